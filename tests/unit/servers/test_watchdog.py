"""An engine that does not reply in time is reported as hung. The engine here is a fake."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from coordexp.servers.engine import Watchdog

pytestmark = pytest.mark.timeout(30)
DEADLINE = 0.2


def watch(ping: Callable[[], Awaitable[None]], seconds: float, extra: float = 0.0) -> Watchdog:
    """Run a watchdog for so many seconds, and return it."""

    async def run() -> Watchdog:
        watchdog = Watchdog(ping, DEADLINE, lambda: extra)
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


def test_an_engine_that_does_not_reply_is_reported_as_hung_after_the_deadline():
    assert watch(never, DEADLINE / 2).problem is None
    problem = watch(never, 1.2).problem
    assert problem is not None and (problem.status, problem.code) == (503, "engine_hung")
    assert "have not answered for 1 s" in problem.problem and "hung_after_s" in problem.fix


@pytest.mark.parametrize("ping", [at_once, slowly])
def test_an_engine_that_answers_does_not_hang_however_long_it_is_watched(ping):
    assert watch(ping, 1.0).problem is None


def test_workers_that_wait_for_weights_may_be_silent_for_as_long_as_that_may_take():
    assert watch(never, 0.8, extra=5.0).problem is None
    assert watch(never, 0.8, extra=0.1).problem is not None


def test_the_extra_time_of_waiting_workers_counts_until_they_have_replied():
    """The reply comes a moment after a long call about weights, when no worker waits any more."""

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


def test_the_watchdog_does_not_report_an_engine_that_has_ended():
    assert watch(fails, 0.5).problem is None


def test_a_server_that_was_suspended_itself_does_not_blame_its_engine():
    async def stopped() -> None:
        """Block the event loop, as SIGSTOP does, and reply a moment later."""
        await asyncio.sleep(0)
        time.sleep(1.0)
        await asyncio.sleep(DEADLINE / 8)

    assert watch(stopped, 0.9).problem is None
