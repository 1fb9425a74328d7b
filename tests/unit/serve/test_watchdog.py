"""An engine that does not answer in time is said to hang. The engine here is a fake."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from coordexp.serve.watchdog import Watchdog

pytestmark = pytest.mark.timeout(30)
DEADLINE = 0.2


def watched(ping: Callable[[], Awaitable[None]], seconds: float, busy: float = 0.0) -> Watchdog:
    """Return the watchdog after so many seconds."""

    async def run() -> Watchdog:
        watchdog = Watchdog(ping, DEADLINE, lambda: busy)
        watching = asyncio.ensure_future(watchdog.run())
        await asyncio.sleep(seconds)
        watching.cancel()
        return watchdog

    return asyncio.run(run())


async def never() -> None:
    await asyncio.Event().wait()


async def at_once() -> None:
    pass


async def slowly() -> None:
    await asyncio.sleep(DEADLINE / 2)


async def fails() -> None:
    raise RuntimeError("the engine has ended")


def test_an_engine_that_does_not_answer_is_said_to_hang_after_the_deadline():
    assert watched(never, DEADLINE / 2).problem is None
    problem = watched(never, 1.2).problem
    assert problem is not None and (problem.status, problem.code) == (503, "engine_hung")
    assert "have not answered for 1 s" in problem.message and "hung_after_s" in problem.fix


@pytest.mark.parametrize("ping", [at_once, slowly])
def test_an_engine_that_answers_does_not_hang_however_long_it_is_watched(ping):
    assert watched(ping, 1.0).problem is None


def test_workers_that_wait_for_weights_may_be_silent_for_as_long_as_that_may_take():
    assert watched(never, 0.8, busy=5.0).problem is None
    assert watched(never, 0.8, busy=0.1).problem is not None


def test_what_was_allowed_while_workers_waited_counts_until_they_have_answered():
    """The question is answered a moment after a long call about weights, when nothing is waited for any more."""

    async def run() -> None:
        waiting = [5.0]
        watchdog = Watchdog(never, DEADLINE, lambda: waiting[0])
        watching = asyncio.ensure_future(watchdog.run())
        while watchdog.silent <= DEADLINE:
            await asyncio.sleep(0.05)
        waiting[0] = 0.0
        assert watchdog.problem is None
        watching.cancel()

    asyncio.run(run())


def test_an_engine_that_has_ended_is_no_matter_of_the_watchdog():
    assert watched(fails, 0.5).problem is None


def test_a_server_that_was_stopped_itself_does_not_blame_its_engine():
    async def stopped() -> None:
        """Hold up the event loop, as SIGSTOP of the process does, and answer a moment later."""
        await asyncio.sleep(0)
        time.sleep(1.0)
        await asyncio.sleep(DEADLINE / 8)

    assert watched(stopped, 0.9).problem is None
