"""Work in daemon threads, with a deadline: a call that never returns does not keep the process from ending."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread
from typing import Any, Generic, TypeVar

REMIND_EVERY_S = 15.0  # while a user waits for something that takes minutes
TELL_EVERY_S = 30.0  # between two lines of a log on the progress of something long

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


def ignore(*_: object) -> None:
    """Do nothing. With `together` it is a barrier, and as a receiver of messages a silent one."""


class Task(Generic[T]):
    """Calls `work(*arguments)` in a thread, at once. Sets `done` when it ends."""

    def __init__(self, work: Callable[..., T], *arguments: Any) -> None:
        self.done = Event()
        self.error: BaseException | None = None
        self._work, self._arguments = work, arguments
        self._result: T | None = None
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._work(*self._arguments)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks for the result
            self.error = error
        self.done.set()

    def result(
        self, *, deadline: float = math.inf, check: Callable[[], None] = ignore, interval: float = 0.2
    ) -> T:
        """Wait for the end, and return the result or raise the error of the work. Raise TimeoutError at the
        deadline, which is a time of `time.monotonic`. `check` is called once per interval, and may raise an error
        that ends the waiting."""
        while not self.done.wait(max(0.0, min(interval, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise TimeoutError
            check()
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]

    def failure(self, kind: type[E]) -> E | None:
        """Wait for the end, and return the error of the work if it is of this kind. `result` raises all others."""
        self.done.wait()
        return self.error if isinstance(self.error, kind) else None


def describe_progress(what: str, done: int, total: int, rate: float) -> str:
    """Return e.g. `answering 1,200 of 20,000, 3.4 per second, 1:32:09 left`."""
    left = f", {rate:.3g} per second, {timedelta(seconds=round((total - done) / rate))} left" if rate else ""
    return f"{what} {done:,} of {total:,}{left}"


@contextmanager
def remind(
    notify: Callable[[str], None], message: str | Callable[[float], str], interval: float = REMIND_EVERY_S
) -> Iterator[None]:
    """Repeat a message as long as this context lasts: a text with the seconds that have passed, or what a function
    makes of them."""
    ended, began = Event(), time.monotonic()

    def repeat() -> None:
        while not ended.wait(interval):
            seconds = time.monotonic() - began
            notify(message(seconds) if callable(message) else f"{message} ({seconds:.0f} s)")

    Thread(target=repeat, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
