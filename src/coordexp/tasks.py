"""Work in daemon threads: a call that never returns does not keep the process from ending."""

from collections.abc import Callable
from threading import Event, Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class Task(Generic[T]):
    """Calls `work(*arguments)` in a thread, at once. Sets `done`, and `changed` if there is one, when it ends."""

    def __init__(self, work: Callable[..., T], *arguments: Any, changed: Event | None = None) -> None:
        self.done = Event()
        self.error: BaseException | None = None
        self._work, self._arguments, self._changed = work, arguments, changed
        self._result: T | None = None
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._work(*self._arguments)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asks for the result
            self.error = error
        self.done.set()
        if self._changed is not None:
            self._changed.set()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end, and return the result or raise the error of the work."""
        if not self.done.wait(timeout):
            raise TimeoutError
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]

    def failure(self, kind: type[E]) -> E | None:
        """Wait for the end, and return the error of the work if it is of this kind. `result` raises all others."""
        self.done.wait()
        return self.error if isinstance(self.error, kind) else None
