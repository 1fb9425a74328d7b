"""Whatever learners do, every answer comes from whole weights of one version. The engine here is a fake, which
records the order of its calls."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from coordexp.errors import EngineError
from coordexp.servers import updates as updates_module
from coordexp.servers.protocol import BeginUpdate, JoinGroup, LoadBucket, Refusal
from coordexp.servers.updates import Updates

METADATA = {"name": "a", "shape": [2], "dtype": "torch.float32", "start_idx": 0, "end_idx": 8}
CONFIG = {"r": 4, "lora_alpha": 8}
A = JoinGroup(group="a", learner="host:1", port=1, world_size=2, timeout_s=5)
B = JoinGroup(group="b", learner="host:2", port=1, world_size=2, timeout_s=5)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates_module, "HANDOVER", 0.05)


class FakeEngine:
    """Records its calls. It fails in the one that `fails` names, and waits in `load` while `gate` is closed."""

    accepts_adapters = True

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

    async def join(self, host: str, port: int, world_size: int, timeout: float) -> None:
        await self._ask("join")

    async def leave(self) -> None:
        await self._ask("leave")

    async def begin(self, is_adapter: bool) -> None:
        await self._ask("begin adapter" if is_adapter else "begin")

    async def load(self, metadatas: Sequence[dict[str, Any]], next_bytes: int) -> None:
        await self.gate.wait()
        await self._ask("load")

    async def build_adapter(self, config: dict[str, Any]) -> None:
        await self._ask("build_adapter")

    async def finish(self, version: str, is_adapter: bool) -> None:
        await self._ask("finish")

    async def abandon(self, is_adapter: bool) -> None:
        await self._ask("abandon adapter" if is_adapter else "abandon")


async def begin(updates: Updates, group: str, version: str, adapter: dict[str, Any] | None = None) -> None:
    await updates.begin(BeginUpdate(group=group, version=version, adapter=adapter))


async def load(updates: Updates, group: str) -> None:
    await updates.load(LoadBucket.model_validate({"group": group, "metadatas": [METADATA]}))


async def send(updates: Updates, version: str, adapter: dict[str, Any] | None = None, group: str = "a") -> None:
    """Send weights of learner a, or of another one."""
    await begin(updates, group, version, adapter)
    await load(updates, group)
    await updates.finish(group)


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
    updates: Updates, adapter: dict[str, Any] | None = None
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
    begun = asyncio.create_task(begin(updates, "a", "1", adapter))
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
        await updates.claim(A)
        old, begun, ended = await waiting(updates)
        new = asyncio.create_task(version_seen(updates))
        await asyncio.sleep(0.02)
        assert not begun.done() and not new.done() and "begin" not in updates.engine.calls
        ended.set()
        assert await old == "default"
        await begun
        await load(updates, "a")
        assert not new.done()
        await updates.finish("a")
        assert await new == "1"

    run(work)


@pytest.mark.parametrize("fails", ["begin", "load", "finish"])
def test_after_a_failed_update_a_server_reports_that_it_has_no_weights_until_a_complete_one(fails):
    async def work() -> None:
        outcomes = []
        engine = FakeEngine(fails)
        updates = Updates(engine, lambda outcome, seconds, size: outcomes.append((outcome, size)))
        await updates.claim(A)

        with refused("update_failed"):
            await send(updates, "1")
        assert engine.calls[-1] == "abandon" and updates.version is None and updates.update is None
        with refused("no_weights"):
            await version_seen(updates)
        engine.fails = ""
        await send(updates, "2")
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
        await updates.claim(A)
        await begin(updates, "a", "1")
        with refused("engine_ended"):
            await load(updates, "a")
        assert updates.update is None and updates.waiting_allowance() == 0
        with refused("no_weights"):
            await version_seen(updates)

    run(work)


def test_a_second_live_learner_is_refused_and_takes_over_when_the_first_is_gone():
    async def work() -> None:
        engine = FakeEngine()
        updates = Updates(engine)
        await updates.claim(A)
        await begin(updates, "a", "1")
        for other in (B, A.model_copy(update={"learner": "stranger:1"})):
            with refused("taken"):
                await updates.claim(other)
        for call in (begin(updates, "b", "1"), load(updates, "b"), updates.finish("b")):
            with refused("other_group"):
                await call
        assert updates.owner is A and updates.update is not None
        await updates.leave(A)
        assert engine.calls[-2:] == ["abandon", "leave"] and updates.owner is None
        with refused("no_weights"):
            await version_seen(updates)
        await updates.claim(B)
        await send(updates, "7", group="b")
        assert await version_seen(updates) == "7"

    run(work)


def test_the_old_weights_stay_if_a_learner_leaves_while_its_update_waits_for_answers():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.claim(A)
        running, begun, ended = await waiting(updates)
        await updates.leave(A)
        with refused("update_failed"):
            await begun
        assert await version_seen(updates) == "default"
        assert not {"begin", "abandon"} & set(updates.engine.calls)
        ended.set()
        await running

    run(work)


def test_of_two_concurrent_updates_the_second_is_refused_and_the_first_goes_on():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.claim(A)
        await begin(updates, "a", "1")
        with refused("update_running"):
            await begin(updates, "a", "2")
        await load(updates, "a")
        assert await updates.finish("a") == "1"
        with refused("no_update"):
            await load(updates, "a")

    run(work)


def test_an_update_without_progress_is_ended_so_that_answers_do_not_wait_forever():
    async def work() -> None:
        updates = Updates(FakeEngine())
        await updates.claim(A.model_copy(update={"timeout_s": 0.05}))
        await begin(updates, "a", "1")
        waiting = asyncio.create_task(version_seen(updates))
        with refused("no_weights"):
            await waiting
        assert updates.update is None

    run(work)


def test_an_update_that_is_ended_twice_while_a_bucket_is_loaded_does_not_end_the_next_one():
    async def work() -> None:
        engine = FakeEngine()
        updates = Updates(engine)
        await updates.claim(A)
        await begin(updates, "a", "1")
        engine.gate.clear()
        taking = asyncio.create_task(load(updates, "a"))
        await asyncio.sleep(0.01)
        failing = [asyncio.create_task(updates.leave(A)) for _ in range(2)]
        await asyncio.sleep(0.01)
        engine.gate.set()
        await taking
        await asyncio.gather(*failing)
        assert engine.calls.count("abandon") == 1
        await updates.claim(A)
        await send(updates, "2")
        assert await version_seen(updates) == "2"

    run(work)


def test_neither_answers_nor_learners_wait_for_an_engine_that_cannot_abandon_an_update():
    async def work() -> None:
        engine = FakeEngine("load")
        updates = Updates(engine)
        await updates.claim(A)
        await begin(updates, "a", "1")
        give_up = engine.abandon

        async def broken(is_adapter: bool) -> None:
            raise EngineError("abandon went wrong")

        engine.abandon = broken  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="abandon went wrong"):
            await load(updates, "a")
        with refused("no_weights"):
            await version_seen(updates)
        engine.abandon, engine.fails = give_up, "leave"  # type: ignore[method-assign]
        with pytest.raises(EngineError):
            await updates.leave(A)
        await updates.claim(B)
        assert updates.owner is B

    run(work)


# An adapter is loaded beside the weights in use, and only on the weights that the server was started with.


async def claimed_updates(engine: FakeEngine | None = None) -> Updates:
    updates = Updates(engine or FakeEngine())
    await updates.claim(A)
    return updates


async def adapter(updates: Updates, version: str) -> None:
    await send(updates, version, CONFIG)


def test_adapters_one_after_the_other_are_versions_like_others():
    async def work() -> None:
        outcomes = []
        engine = FakeEngine()
        updates = Updates(engine, lambda outcome, seconds, size: outcomes.append((outcome, size)))
        await updates.claim(A)
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
