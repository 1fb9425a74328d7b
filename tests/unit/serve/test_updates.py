"""Whatever learners do, answers come from whole weights of one version. The engine here is a fake: the rules are
meant, and their order."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from coordexp.errors import EngineError
from coordexp.serve.refusal import Refusal
from coordexp.serve.updates import Session, Updates

ONE = [{"name": "a", "shape": [2], "dtype": "torch.float32", "start_idx": 0, "end_idx": 8, "numel": 2}]
A, B = Session("a", "host:1"), Session("b", "host:2")


class FakeEngine:
    """Notes what it is asked; `fails` at one of the calls; waits in `take` while `gate` is closed."""

    takes_adapters = True

    def __init__(self, fails: str = "") -> None:
        self.asked: list[str] = []
        self.fails = fails
        self.gate = asyncio.Event()
        self.gate.set()

    async def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what == self.fails:
            raise EngineError(f"{what} went wrong")

    async def ping(self) -> None:
        await self._ask("ping")

    async def join(self, host: str, port: int, world_size: int, timeout: float, plain: bool) -> None:
        await self._ask("join")

    async def leave(self) -> None:
        await self._ask("leave")

    async def begin(self) -> None:
        await self._ask("begin")

    async def take(self, metadatas: Sequence[dict[str, Any]], next_bytes: int) -> None:
        await self.gate.wait()
        await self._ask("take")

    async def finish(self, version: str) -> None:
        await self._ask("finish")

    async def abandon(self) -> None:
        await self._ask("abandon")

    async def begin_adapter(self) -> None:
        await self._ask("begin_adapter")

    async def take_adapter(self, metadatas: Sequence[dict[str, Any]]) -> None:
        await self.gate.wait()
        await self._ask("take_adapter")

    async def build_adapter(self, config: dict[str, Any]) -> None:
        await self._ask("build_adapter")

    async def finish_adapter(self, version: str) -> None:
        await self._ask("finish_adapter")

    async def abandon_adapter(self) -> None:
        await self._ask("abandon_adapter")

    async def forget(self) -> None:
        await self._ask("forget")


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 10))


async def soon(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to be")


async def version_seen(updates: Updates) -> str:
    async with updates.answers() as version:
        return version


async def waiting(
    updates: Updates, adapter: bool = False
) -> tuple[asyncio.Task[str], asyncio.Task[None], asyncio.Event]:
    """An answer that runs until the event, and an update by session a that waits for its end."""
    ended = asyncio.Event()

    async def answer() -> str:
        async with updates.answers() as version:
            await ended.wait()
            return version

    running = asyncio.create_task(answer())
    await soon(lambda: updates.answering == 1)
    begun = asyncio.create_task(updates.begin("a", "1", adapter))
    await soon(lambda: updates.update is not None)
    return running, begun, ended


@contextmanager
def refused(code: str) -> Iterator[None]:
    with pytest.raises(Refusal) as found:
        yield
    assert found.value.code == code


def test_an_update_begins_when_running_answers_have_ended_and_new_ones_wait_for_its_end():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.claim(A)
        old, begun, ended = await waiting(updates)
        new = asyncio.create_task(version_seen(updates))
        await asyncio.sleep(0.02)
        assert not begun.done() and not new.done() and "begin" not in updates.engine.asked
        ended.set()
        assert await old == "default"
        await begun
        await updates.take("a", ONE)
        assert not new.done()
        await updates.finish("a", "1")
        assert await new == "1"

    run(work)


@pytest.mark.parametrize("fails", ["begin", "take", "finish"])
def test_a_failed_update_leaves_a_server_that_says_so_until_a_whole_one_comes(fails):
    async def work() -> None:
        told = []
        engine = FakeEngine(fails)
        updates = Updates(engine, lambda how, seconds, size: told.append((how, size)))
        await updates.claim(A)

        async def whole(version: str) -> None:
            await updates.begin("a", version)
            await updates.take("a", ONE)
            await updates.finish("a", version)

        with refused("update_failed"):
            await whole("1")
        assert engine.asked[-1] == "abandon" and updates.version is None and updates.update is None
        with refused("no_weights"):
            await version_seen(updates)
        engine.fails = ""
        await whole("2")
        assert await version_seen(updates) == "2"
        assert [how for how, _ in told] == ["failed", "done"] and told[-1] == ("done", 8)

    run(work)


class EndingEngine(FakeEngine):
    """Ends in `take`, and refuses everything from then on."""

    async def _ask(self, what: str) -> None:
        self.asked.append(what)
        if "take" in self.asked:
            raise Refusal(503, "engine_ended", "the engine has ended")


def test_an_engine_that_ends_in_an_update_is_told_as_that_and_holds_up_nobody():
    async def work() -> None:
        updates = Updates(EndingEngine())
        await updates.claim(A)
        await updates.begin("a", "1")
        with refused("engine_ended"):
            await updates.take("a", ONE)
        assert updates.update is None and updates.patience == 0
        with refused("no_weights"):
            await version_seen(updates)

    run(work)


def test_a_session_that_is_held_cannot_be_claimed_again_by_whoever_knows_its_name():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.claim(A)
        await updates.begin("a", "1")
        with refused("session_taken"):
            await updates.claim(Session("a", "stranger:1"))
        assert updates.session is A and updates.update is not None
        await updates.release(A)
        await updates.claim(Session("a", "host:1"))

    run(work)


def test_a_second_live_learner_is_refused_and_takes_over_when_the_first_is_gone():
    async def work() -> None:
        engine = FakeEngine()
        updates = Updates(engine)
        await updates.claim(A)
        await updates.join("a", "", 1, 2, 5)
        await updates.begin("a", "1")
        with refused("session_taken"):
            await updates.claim(B)
        plain = updates.join(None, "", 1, 2, 5)
        for call in (plain, updates.begin("b", "1"), updates.take("b", ONE), updates.finish(None, "1")):
            with refused("no_session"):
                await call
        await updates.release(A)
        assert engine.asked[-2:] == ["abandon", "leave"] and updates.session is None
        with refused("no_weights"):
            await version_seen(updates)
        await updates.claim(B)
        await updates.begin("b", "7")
        await updates.take("b", ONE)
        await updates.finish("b", "7")
        assert await version_seen(updates) == "7"

    run(work)


def test_a_learner_that_leaves_while_it_waits_for_answers_to_end_leaves_the_old_weights_as_they_were():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.claim(A)
        running, begun, ended = await waiting(updates)
        await updates.release(A)
        with refused("update_failed"):
            await begun
        assert await version_seen(updates) == "default"
        assert not {"begin", "abandon"} & set(updates.engine.asked)
        ended.set()
        await running

    run(work)


def test_of_two_concurrent_updates_the_second_is_refused_and_the_first_goes_on():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.claim(A)
        await updates.begin("a", "1")
        with refused("update_running"):
            await updates.begin("a", "2")
        with refused("other_version"):
            await updates.finish("a", "2")
        await updates.take("a", ONE)
        assert await updates.finish("a", "1") == "1"
        with refused("no_update"):
            await updates.take("a", ONE)

    run(work)


def test_an_update_that_stands_still_is_ended_so_that_answers_do_not_wait_for_ever():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.claim(A)
        await updates.join("a", "", 1, 2, timeout=0.05)
        await updates.begin("a", "1")
        waiting = asyncio.create_task(version_seen(updates))
        with refused("no_weights"):
            await waiting
        assert updates.update is None

    run(work)


def test_a_watch_that_fires_while_a_bucket_comes_ends_the_update_after_it_and_not_the_next_one():
    async def work() -> None:
        engine = FakeEngine()
        updates = Updates(engine)
        await updates.claim(A)
        await updates.begin("a", "1")
        engine.gate.clear()
        taking = asyncio.create_task(updates.take("a", ONE))
        await asyncio.sleep(0.01)
        failing = [asyncio.create_task(updates.abandon("a")) for _ in range(2)]
        await asyncio.sleep(0.01)
        engine.gate.set()
        await taking
        await asyncio.gather(*failing)
        assert engine.asked.count("abandon") == 1
        await updates.begin("a", "2")
        await updates.take("a", ONE)
        await updates.finish("a", "2")
        assert await version_seen(updates) == "2"

    run(work)


def test_clients_of_the_plain_contract_begin_with_the_first_weight_and_end_with_what_follows():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.join(None, "", 1, 2, 5)
        await updates.finish_plain()
        assert await version_seen(updates) == "default"
        for number in (1, 2):
            await updates.take(None, ONE)
            await updates.take(None, ONE)
            await updates.finish_plain()
            await updates.finish_plain()
            assert await version_seen(updates) == f"plain-{number}"
        assert updates.engine.asked.count("finish") == 2

    run(work)


def test_an_engine_that_cannot_even_abandon_keeps_neither_answers_nor_learners_waiting():
    async def work() -> None:
        engine = FakeEngine("take")
        updates = Updates(engine)
        await updates.claim(A)
        await updates.begin("a", "1")
        give_up = engine.abandon

        async def broken() -> None:
            raise EngineError("abandon went wrong")

        engine.abandon = broken  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="abandon went wrong"):
            await updates.take("a", ONE)
        with refused("no_weights"):
            await version_seen(updates)
        engine.abandon, engine.fails = give_up, "leave"  # type: ignore[method-assign]
        with pytest.raises(EngineError):
            await updates.release(A)
        with pytest.raises(EngineError):
            await updates.claim(B)
        engine.fails = ""
        await updates.claim(B)
        assert updates.session is B

    run(work)


def test_weights_that_come_before_running_answers_have_ended_are_refused():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.claim(A)
        running, begun, ended = await waiting(updates)
        with refused("no_update"):
            await updates.take("a", ONE)
        ended.set()
        await asyncio.gather(begun, running)
        await updates.take("a", ONE)

    run(work)
