"""Work in threads that nobody has to wait for: a call that never returns does not keep a process from ending."""

from collections.abc import Callable
from threading import Event, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Task(Generic[T]):
    """Runs at once. `changed` is set, too, when it is done."""

    def __init__(self, work: Callable[[], T], changed: Event | None = None) -> None:
        self.done = Event()
        self.error: BaseException | None = None
        self._changed, self._work = changed, work
        self._result: T | None = None
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks for the result
            self.error = error
        self.done.set()
        if self._changed is not None:
            self._changed.set()

    def result(self, timeout: float | None = None) -> T:
        if not self.done.wait(timeout):
            raise TimeoutError
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]
