"""Whatever learners do, every answer comes from whole weights of one version. The engine here is a fake, which
records the order of its calls."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from coordexp.errors import EngineError
from coordexp.servers import updates as updates_module
from coordexp.servers.protocol import JoinGroup, Refusal
from coordexp.servers.updates import Updates

METADATAS = [{"name": "a", "shape": [2], "dtype": "torch.float32", "start_idx": 0, "end_idx": 8, "numel": 2}]
A = JoinGroup(group="a", learner="host:1", port=1, world_size=2, timeout_s=5)
B = JoinGroup(group="b", learner="host:2", port=1, world_size=2, timeout_s=5)
PLAIN = JoinGroup(port=1, world_size=2, timeout_s=5)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates_module, "TAKEN", 0.05)


class FakeEngine:
    """Records its calls. It fails in the one that `fails` names, and waits in `load` while `gate` is closed."""

    takes_adapters = True

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self.fails = fails
        self.gate = asyncio.Event()
        self.gate.set()

    async def _ask(self, method: str) -> None:
        self.calls.append(method)
        if method == self.fails:
            raise EngineError(f"{method} went wrong")

    async def ping(self) -> None:
        await self._ask("ping")

    async def join(self, host: str, port: int, world_size: int, timeout: float, plain: bool) -> None:
        await self._ask("join")

    async def leave(self) -> None:
        await self._ask("leave")

    async def start(self) -> None:
        await self._ask("start")

    async def load(self, metadatas: Sequence[dict[str, Any]], next_bytes: int) -> None:
        await self.gate.wait()
        await self._ask("load")

    async def finish(self, version: str) -> None:
        await self._ask("finish")

    async def abandon(self) -> None:
        await self._ask("abandon")

    async def load_adapter(self, metadatas: Sequence[dict[str, Any]]) -> None:
        await self.gate.wait()
        await self._ask("load_adapter")

    async def build_adapter(self, config: dict[str, Any]) -> None:
        await self._ask("build_adapter")

    async def finish_adapter(self, version: str) -> None:
        await self._ask("finish_adapter")

    async def forget_adapter(self) -> None:
        await self._ask("forget_adapter")

    async def clear_caches(self) -> None:
        await self._ask("clear_caches")


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 10))


async def soon(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the condition did not become true")


async def version_seen(updates: Updates) -> str:
    async with updates.answers() as version:
        return version


async def waiting(
    updates: Updates, adapter: bool = False
) -> tuple[asyncio.Task[str], asyncio.Task[None], asyncio.Event]:
    """Return an answer that runs until the event is set, an update of learner a that waits for its end, and the
    event."""
    ended = asyncio.Event()

    async def answer() -> str:
        async with updates.answers() as version:
            await ended.wait()
            return version

    running = asyncio.create_task(answer())
    await soon(lambda: updates.answering == 1)
    begun = asyncio.create_task(updates.start("a", "1", adapter))
    await soon(lambda: updates.update is not None)
    return running, begun, ended


@contextmanager
def refused(code: str) -> Iterator[None]:
    with pytest.raises(Refusal) as refusal:
        yield
    assert refusal.value.code == code


def test_an_update_begins_when_running_answers_have_ended_and_new_ones_wait_for_its_end():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.take(A)
        old, begun, ended = await waiting(updates)
        new = asyncio.create_task(version_seen(updates))
        await asyncio.sleep(0.02)
        assert not begun.done() and not new.done() and "start" not in updates.engine.calls
        ended.set()
        assert await old == "default"
        await begun
        await updates.load("a", METADATAS)
        assert not new.done()
        await updates.finish("a", "1")
        assert await new == "1"

    run(work)


@pytest.mark.parametrize("fails", ["start", "load", "finish"])
def test_after_a_failed_update_a_server_reports_that_it_has_no_weights_until_a_complete_one(fails):
    async def work() -> None:
        outcomes = []
        engine = FakeEngine(fails)
        updates = Updates(engine, lambda outcome, seconds, size: outcomes.append((outcome, size)))
        await updates.take(A)

        async def whole(version: str) -> None:
            await updates.start("a", version)
            await updates.load("a", METADATAS)
            await updates.finish("a", version)

        with refused("update_failed"):
            await whole("1")
        assert engine.calls[-1] == "abandon" and updates.version is None and updates.update is None
        with refused("no_weights"):
            await version_seen(updates)
        engine.fails = ""
        await whole("2")
        assert await version_seen(updates) == "2"
        assert [outcome for outcome, _ in outcomes] == ["failed", "done"] and outcomes[-1] == ("done", 8)

    run(work)


class EndingEngine(FakeEngine):
    """Ends in `load`, and refuses everything from then on."""

    async def _ask(self, method: str) -> None:
        self.calls.append(method)
        if "load" in self.calls:
            raise Refusal(503, "engine_ended", "the engine has ended")


def test_an_engine_that_ends_in_an_update_is_reported_as_ended_and_blocks_nobody():
    async def work() -> None:
        updates = Updates(EndingEngine())
        await updates.take(A)
        await updates.start("a", "1")
        with refused("engine_ended"):
            await updates.load("a", METADATAS)
        assert updates.update is None and updates.waiting_allowance() == 0
        with refused("no_weights"):
            await version_seen(updates)

    run(work)


def test_a_second_live_learner_is_refused_and_takes_over_when_the_first_is_gone():
    async def work() -> None:
        engine = FakeEngine()
        updates = Updates(engine)
        await updates.take(A)
        await updates.start("a", "1")
        for other in (B, PLAIN, A.model_copy(update={"learner": "stranger:1"})):
            with refused("taken"):
                await updates.take(other)
        for call in (updates.start("b", "1"), updates.load("b", METADATAS), updates.finish(None, "1")):
            with refused("other_group"):
                await call
        assert updates.owner is A and updates.update is not None
        await updates.leave(A)
        assert engine.calls[-2:] == ["abandon", "leave"] and updates.owner is None
        with refused("no_weights"):
            await version_seen(updates)
        await updates.take(B)
        await updates.start("b", "7")
        await updates.load("b", METADATAS)
        await updates.finish("b", "7")
        assert await version_seen(updates) == "7"

    run(work)


def test_a_learner_waits_for_the_end_of_one_that_has_just_died(monkeypatch):
    async def work() -> None:
        monkeypatch.setattr(updates_module, "TAKEN", 5.0)
        updates = Updates(FakeEngine())
        await updates.take(A)
        joining = asyncio.create_task(updates.take(B))
        await asyncio.sleep(0.02)
        assert updates.owner is A
        await updates.leave(A)
        await joining
        assert updates.owner is B

    run(work)


def test_the_old_weights_stay_if_a_learner_leaves_while_its_update_waits_for_answers():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.take(A)
        running, begun, ended = await waiting(updates)
        await updates.leave(A)
        with refused("update_failed"):
            await begun
        assert await version_seen(updates) == "default"
        assert not {"start", "abandon"} & set(updates.engine.calls)
        ended.set()
        await running

    run(work)


def test_of_two_concurrent_updates_the_second_is_refused_and_the_first_goes_on():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.take(A)
        await updates.start("a", "1")
        with refused("update_running"):
            await updates.start("a", "2")
        with refused("other_version"):
            await updates.finish("a", "2")
        await updates.load("a", METADATAS)
        assert await updates.finish("a", "1") == "1"
        with refused("no_update"):
            await updates.load("a", METADATAS)

    run(work)


def test_an_update_without_progress_is_ended_so_that_answers_do_not_wait_forever():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.take(A.model_copy(update={"timeout_s": 0.05}))
        await updates.start("a", "1")
        waiting = asyncio.create_task(version_seen(updates))
        with refused("no_weights"):
            await waiting
        assert updates.update is None

    run(work)


def test_an_update_that_is_ended_twice_while_a_bucket_is_loaded_does_not_end_the_next_one():
    async def work() -> None:
        engine = FakeEngine()
        updates = Updates(engine)
        await updates.take(A)
        await updates.start("a", "1")
        engine.gate.clear()
        taking = asyncio.create_task(updates.load("a", METADATAS))
        await asyncio.sleep(0.01)
        failing = [asyncio.create_task(updates.close_group("a")) for _ in range(2)]
        await asyncio.sleep(0.01)
        engine.gate.set()
        await taking
        await asyncio.gather(*failing)
        assert engine.calls.count("abandon") == 1
        await updates.start("a", "2")
        await updates.load("a", METADATAS)
        await updates.finish("a", "2")
        assert await version_seen(updates) == "2"

    run(work)


def test_an_update_of_a_plain_client_begins_with_its_first_weight_and_ends_with_the_calls_after_it():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.take(PLAIN)
        await updates.finish_plain()
        assert await version_seen(updates) == "default"
        for number in (1, 2):
            for _ in range(2):
                await updates.load(None, METADATAS)
            await updates.finish_plain()
            await updates.finish_plain()
            assert await version_seen(updates) == f"plain-{number}"
        assert updates.engine.calls.count("finish") == 2

    run(work)


def test_neither_answers_nor_learners_wait_for_an_engine_that_cannot_abandon_an_update():
    async def work() -> None:
        engine = FakeEngine("load")
        updates = Updates(engine)
        await updates.take(A)
        await updates.start("a", "1")
        give_up = engine.abandon

        async def broken() -> None:
            raise EngineError("abandon went wrong")

        engine.abandon = broken  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="abandon went wrong"):
            await updates.load("a", METADATAS)
        with refused("no_weights"):
            await version_seen(updates)
        engine.abandon, engine.fails = give_up, "leave"  # type: ignore[method-assign]
        with pytest.raises(EngineError):
            await updates.leave(A)
        with pytest.raises(EngineError):
            await updates.take(B)
        engine.fails = ""
        await updates.take(B)
        assert updates.owner is B

    run(work)


def test_weights_that_come_before_running_answers_have_ended_are_refused():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.take(A)
        running, begun, ended = await waiting(updates)
        with refused("no_update"):
            await updates.load("a", METADATAS)
        ended.set()
        await asyncio.gather(begun, running)
        await updates.load("a", METADATAS)

    run(work)
