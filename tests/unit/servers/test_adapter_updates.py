"""An adapter is loaded beside the weights in use, and only on the weights that the server was started with. The
engine is a fake, which records the order of its calls."""

import asyncio

import pytest

from coordexp.servers.updates import Updates
from tests.unit.servers.test_updates import METADATAS, PLAIN, A, FakeEngine, refused, run, version_seen, waiting

CONFIG = {"r": 4, "lora_alpha": 8}


async def claimed_updates(engine: FakeEngine | None = None) -> Updates:
    updates = Updates(engine or FakeEngine())
    await updates.take(A)
    return updates


async def adapter(updates: Updates, version: str) -> None:
    await updates.start("a", version, adapter=True)
    await updates.load("a", METADATAS, config=CONFIG)
    await updates.finish("a", version)


async def whole(updates: Updates, version: str) -> None:
    await updates.start("a", version)
    await updates.load("a", METADATAS)
    await updates.finish("a", version)


def test_adapters_one_after_the_other_are_versions_like_others():
    async def work() -> None:
        outcomes = []
        engine = FakeEngine()
        updates = Updates(engine, lambda outcome, seconds, size: outcomes.append((outcome, size)))
        await updates.take(A)
        for version in ("1", "2"):
            await adapter(updates, version)
            assert await version_seen(updates) == version
        once = ["forget_adapter", "load_adapter", "build_adapter", "finish_adapter"]
        assert engine.calls == ["leave", *once, *once]
        assert outcomes == [("done", 8)] * 2 and not updates.base_changed

    run(work)


def test_an_adapter_waits_for_running_answers_and_new_ones_wait_for_it():
    async def work() -> None:
        updates = await claimed_updates()
        old, begun, ended = await waiting(updates, adapter=True)
        new = asyncio.create_task(version_seen(updates))
        await asyncio.sleep(0.02)
        assert not begun.done() and not new.done()
        ended.set()
        assert await old == "default"
        await begun
        await updates.load("a", METADATAS, config=CONFIG)
        await updates.finish("a", "1")
        assert await new == "1"

    run(work)


@pytest.mark.parametrize(
    ("fails", "code"),
    [("load_adapter", "update_failed"), ("build_adapter", "adapter_refused")],
)
def test_the_old_version_stays_if_an_adapter_fails_before_it_is_put_into_use(fails, code):
    async def work() -> None:
        updates = await claimed_updates()
        await adapter(updates, "1")
        updates.engine.fails = fails
        with refused(code):
            await adapter(updates, "2")
        assert updates.engine.calls[-1] == "forget_adapter" and updates.update is None
        assert await version_seen(updates) == "1"
        updates.engine.fails = ""
        await adapter(updates, "3")
        assert await version_seen(updates) == "3"

    run(work)


@pytest.mark.parametrize("then", [adapter, whole])
def test_an_adapter_that_fails_while_it_is_put_into_use_leaves_no_version_until_the_next_sync(then):
    async def work() -> None:
        updates = await claimed_updates(FakeEngine("finish_adapter"))
        with refused("update_failed"):
            await adapter(updates, "1")
        with refused("no_weights"):
            await version_seen(updates)
        updates.engine.fails = "load_adapter"
        with refused("update_failed"):
            await adapter(updates, "2")
        with refused("no_weights"):
            await version_seen(updates)
        updates.engine.fails = ""
        await then(updates, "3")
        assert await version_seen(updates) == "3"

    run(work)


@pytest.mark.parametrize("fails", ["", "start", "load", "finish"])
def test_no_adapter_is_accepted_after_an_update_of_whole_weights_has_begun(fails):
    async def work() -> None:
        updates = await claimed_updates()
        await adapter(updates, "1")
        updates.engine.fails = fails
        if fails:
            with refused("update_failed"):
                await whole(updates, "2")
        else:
            await whole(updates, "2")
        assert updates.base_changed
        updates.engine.fails = ""
        with refused("base_changed"):
            await updates.start("a", "3", adapter=True)
        assert updates.update is None and updates.version == (None if fails else "2")
        await whole(updates, "4")
        assert await version_seen(updates) == "4"

    run(work)


def test_adapters_are_still_accepted_after_an_update_of_whole_weights_ended_before_it_began():
    async def work() -> None:
        updates = await claimed_updates()
        running, begun, ended = await waiting(updates)
        await updates.close_group("a")
        with refused("update_failed"):
            await begun
        ended.set()
        await running
        assert not updates.base_changed
        await adapter(updates, "2")
        assert await version_seen(updates) == "2"

    run(work)


def test_the_old_version_stays_if_a_learner_leaves_during_an_adapter_update():
    async def work() -> None:
        updates = await claimed_updates()
        await adapter(updates, "1")
        await updates.start("a", "2", adapter=True)
        await updates.load("a", METADATAS, config=CONFIG)
        await updates.leave(A)
        assert updates.engine.calls[-2:] == ["forget_adapter", "leave"]
        assert await version_seen(updates) == "1"

    run(work)


def test_an_update_takes_only_the_kind_of_weights_that_it_began_with():
    async def work() -> None:
        updates = await claimed_updates()
        await updates.start("a", "1", adapter=True)
        with refused("other_kind"):
            await updates.load("a", METADATAS)
        await updates.load("a", METADATAS, config=CONFIG)
        with refused("bad_request"):
            await updates.load("a", METADATAS, config=CONFIG | {"r": 5})
        await updates.finish("a", "1")
        await updates.start("a", "2", adapter=True)
        with refused("adapter_refused"):
            await updates.finish("a", "2")
        assert await version_seen(updates) == "1"
        await updates.start("a", "3")
        with refused("other_kind"):
            await updates.load("a", METADATAS, config=CONFIG)

    run(work)


def test_a_server_without_support_for_adapters_refuses_them_and_keeps_its_weights():
    async def work() -> None:
        updates = await claimed_updates()
        updates.engine.takes_adapters = False
        with refused("no_lora"):
            await updates.start("a", "1", adapter=True)
        assert await version_seen(updates) == "default"

    run(work)


def test_a_plain_client_sends_adapters_without_a_start_call():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.take(PLAIN)
        for number in (1, 2):
            await updates.load(None, METADATAS, config=CONFIG)
            await updates.finish_plain()
            assert await version_seen(updates) == f"plain-{number}"
        await updates.load(None, METADATAS)
        await updates.finish_plain()
        with refused("base_changed"):
            await updates.load(None, METADATAS, config=CONFIG)
        assert await version_seen(updates) == "plain-3"

    run(work)
