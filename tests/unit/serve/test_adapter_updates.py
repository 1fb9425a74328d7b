"""An adapter is taken beside what answers are made with, on the weights that the server was started with only. The
engine is a fake: the rules are meant."""

import asyncio

import pytest

from coordexp.serve.updates import Updates
from tests.unit.serve.test_updates import ONE, A, FakeEngine, refused, run, version_seen, waiting

CONFIG = {"r": 4, "lora_alpha": 8}


async def held(engine: FakeEngine | None = None) -> Updates:
    updates = Updates(engine or FakeEngine())
    await updates.claim(A)
    return updates


async def adapter(updates: Updates, version: str) -> None:
    await updates.begin("a", version, adapter=True)
    await updates.take_adapter("a", CONFIG, ONE)
    await updates.finish("a", version)


async def whole(updates: Updates, version: str) -> None:
    await updates.begin("a", version)
    await updates.take("a", ONE)
    await updates.finish("a", version)


def test_adapters_one_after_the_other_are_versions_like_others():
    async def work() -> None:
        told = []
        engine = FakeEngine()
        updates = Updates(engine, lambda how, seconds, size: told.append((how, size)))
        await updates.claim(A)
        for version in ("1", "2"):
            await adapter(updates, version)
            assert await version_seen(updates) == version
        once = ["begin_adapter", "take_adapter", "build_adapter", "finish_adapter"]
        assert engine.asked == ["leave", *once, *once]
        assert told == [("done", 8)] * 2 and not updates.base_changed

    run(work)


def test_an_adapter_waits_for_running_answers_and_new_ones_wait_for_it():
    async def work() -> None:
        updates = await held()
        old, begun, ended = await waiting(updates, adapter=True)
        new = asyncio.create_task(version_seen(updates))
        await asyncio.sleep(0.02)
        assert not begun.done() and not new.done()
        ended.set()
        assert await old == "default"
        await begun
        await updates.take_adapter("a", CONFIG, ONE)
        await updates.finish("a", "1")
        assert await new == "1"

    run(work)


@pytest.mark.parametrize(
    ("fails", "code"),
    [("begin_adapter", "update_failed"), ("take_adapter", "update_failed"), ("build_adapter", "adapter_refused")],
)
def test_an_adapter_that_fails_before_it_is_in_use_leaves_the_old_version(fails, code):
    async def work() -> None:
        updates = await held()
        await adapter(updates, "1")
        updates.engine.fails = fails
        with refused(code):
            await adapter(updates, "2")
        assert updates.engine.asked[-1] == "abandon_adapter" and updates.update is None
        assert await version_seen(updates) == "1"
        updates.engine.fails = ""
        await adapter(updates, "3")
        assert await version_seen(updates) == "3"

    run(work)


@pytest.mark.parametrize("then", [adapter, whole])
def test_an_adapter_that_fails_while_it_is_put_in_use_leaves_no_version_until_another_sync(then):
    async def work() -> None:
        updates = await held(FakeEngine("finish_adapter"))
        with refused("update_failed"):
            await adapter(updates, "1")
        with refused("no_weights"):
            await version_seen(updates)
        updates.engine.fails = "take_adapter"
        with refused("update_failed"):
            await adapter(updates, "2")
        with refused("no_weights"):
            await version_seen(updates)
        updates.engine.fails = ""
        await then(updates, "3")
        assert await version_seen(updates) == "3"

    run(work)


@pytest.mark.parametrize("fails", ["", "begin", "take", "finish"])
def test_no_adapter_is_taken_after_whole_weights_have_begun_to_come(fails):
    async def work() -> None:
        updates = await held()
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
            await updates.begin("a", "3", adapter=True)
        assert updates.update is None and updates.version == (None if fails else "2")
        await whole(updates, "4")
        assert await version_seen(updates) == "4"

    run(work)


def test_whole_weights_that_were_given_up_before_they_began_leave_adapters_possible():
    async def work() -> None:
        updates = await held()
        running, begun, ended = await waiting(updates)
        await updates.abandon("a")
        with refused("update_failed"):
            await begun
        ended.set()
        await running
        assert not updates.base_changed
        await adapter(updates, "2")
        assert await version_seen(updates) == "2"

    run(work)


def test_a_learner_that_leaves_in_an_adapter_update_leaves_the_old_version():
    async def work() -> None:
        updates = await held()
        await adapter(updates, "1")
        await updates.begin("a", "2", adapter=True)
        await updates.take_adapter("a", CONFIG, ONE)
        await updates.release(A)
        assert updates.engine.asked[-2:] == ["abandon_adapter", "leave"]
        assert await version_seen(updates) == "1"

    run(work)


def test_what_was_begun_is_what_must_come():
    async def work() -> None:
        updates = await held()
        await updates.begin("a", "1", adapter=True)
        with refused("other_kind"):
            await updates.take("a", ONE)
        await updates.take_adapter("a", CONFIG, ONE)
        with refused("bad_request"):
            await updates.take_adapter("a", CONFIG | {"r": 5}, ONE)
        await updates.finish("a", "1")
        await updates.begin("a", "2", adapter=True)
        with refused("adapter_refused"):
            await updates.finish("a", "2")
        assert await version_seen(updates) == "1"
        await updates.begin("a", "3")
        with refused("other_kind"):
            await updates.take_adapter("a", CONFIG, ONE)

    run(work)


def test_a_server_without_a_place_for_adapters_says_so_and_stays_as_it_is():
    async def work() -> None:
        updates = await held()
        updates.engine.takes_adapters = False
        with refused("no_lora"):
            await updates.begin("a", "1", adapter=True)
        assert await version_seen(updates) == "default"

    run(work)


def test_a_plain_client_sends_adapters_without_a_beginning():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.join(None, "", 1, 2, 5)
        for number in (1, 2):
            await updates.take_adapter(None, CONFIG, ONE)
            await updates.finish_plain()
            assert await version_seen(updates) == f"plain-{number}"
        await updates.take(None, ONE)
        await updates.finish_plain()
        with refused("base_changed"):
            await updates.take_adapter(None, CONFIG, ONE)
        assert await version_seen(updates) == "plain-3"

    run(work)
