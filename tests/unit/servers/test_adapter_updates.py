"""An adapter is loaded beside the weights in use, and only on the weights that the server was started with. The
engine is a fake, which records the order of its calls."""

import pytest

from coordexp.servers.updates import Updates
from tests.unit.servers.test_updates import (
    CONFIG,
    A,
    FakeEngine,
    begin,
    load,
    refused,
    run,
    send,
    version_seen,
)


async def claimed_updates(engine: FakeEngine | None = None) -> Updates:
    updates = Updates(engine or FakeEngine())
    await updates.take(A)
    return updates


async def adapter(updates: Updates, version: str) -> None:
    await send(updates, version, CONFIG)


def test_adapters_one_after_the_other_are_versions_like_others():
    async def work() -> None:
        outcomes = []
        engine = FakeEngine()
        updates = Updates(engine, lambda outcome, seconds, size: outcomes.append((outcome, size)))
        await updates.take(A)
        for version in ("1", "2"):
            await adapter(updates, version)
            assert await version_seen(updates) == version
        once = ["begin adapter", "load", "build_adapter", "finish"]
        assert engine.calls == [*once, *once]
        assert outcomes == [("done", 8)] * 2 and not updates.base_changed

    run(work)


@pytest.mark.parametrize(
    ("fails", "code"),
    [("load", "update_failed"), ("build_adapter", "adapter_refused")],
)
def test_the_old_version_stays_if_an_adapter_fails_before_it_is_put_into_use(fails, code):
    async def work() -> None:
        updates = await claimed_updates()
        await adapter(updates, "1")
        updates.engine.fails = fails
        with refused(code):
            await adapter(updates, "2")
        assert updates.engine.calls[-1] == "abandon adapter" and updates.update is None
        assert await version_seen(updates) == "1"
        updates.engine.fails = ""
        await adapter(updates, "3")
        assert await version_seen(updates) == "3"

    run(work)


@pytest.mark.parametrize("then", [adapter, send])
def test_an_adapter_that_fails_while_it_is_put_into_use_leaves_no_version_until_the_next_sync(then):
    async def work() -> None:
        updates = await claimed_updates(FakeEngine("finish"))
        with refused("update_failed"):
            await adapter(updates, "1")
        with refused("no_weights"):
            await version_seen(updates)
        updates.engine.fails = "load"
        with refused("update_failed"):
            await adapter(updates, "2")
        with refused("no_weights"):
            await version_seen(updates)
        updates.engine.fails = ""
        await then(updates, "3")
        assert await version_seen(updates) == "3"

    run(work)


@pytest.mark.parametrize("fails", ["", "begin", "load", "finish"])
def test_no_adapter_is_accepted_after_an_update_of_whole_weights_has_begun(fails):
    async def work() -> None:
        updates = await claimed_updates()
        await adapter(updates, "1")
        updates.engine.fails = fails
        if fails:
            with refused("update_failed"):
                await send(updates, "2")
        else:
            await send(updates, "2")
        assert updates.base_changed
        updates.engine.fails = ""
        with refused("base_changed"):
            await begin(updates, "a", "3", CONFIG)
        assert updates.update is None and updates.version == (None if fails else "2")
        await send(updates, "4")
        assert await version_seen(updates) == "4"

    run(work)


def test_the_old_version_stays_if_a_learner_leaves_during_an_adapter_update():
    async def work() -> None:
        updates = await claimed_updates()
        await adapter(updates, "1")
        await begin(updates, "a", "2", CONFIG)
        await load(updates, "a")
        await updates.leave(A)
        assert updates.engine.calls[-2:] == ["abandon adapter", "leave"]
        assert await version_seen(updates) == "1"

    run(work)
