"""How SIGTERM and Ctrl-C stop a run. What the run is doing at that moment decides what it finishes first.

A thread receives the signals, because Python runs a signal handler only when the main thread returns to the
interpreter, and it may be in a collective that waits for another rank. All ranks stop after the same step,
whichever of them got the signal.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Event, Lock, Thread
from typing import Any, Literal

from transformers import TrainerCallback

from coordexp.ranks import max_over_ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME = 1.0  # seconds within which further signals count as the same one: a scheduler and torchrun may both send it
START_GRACE = 15.0  # seconds for an interrupted start to clean up, before the process exits regardless
Phase = Literal["start", "step", "evaluation", "save", "end"]


class Stopped(Exception):
    """The run was asked to stop, and abandons what it was doing."""


def exit_code(number: int) -> int:
    """Return the exit code of a run that stopped in an orderly way because of a signal."""
    return 128 + number if number == signal.SIGINT else 0


def stop_line(number: int, phase: Phase, step: int) -> str:
    """Return the line that is printed when a signal arrives. `step` is the last one that is done."""
    name = signal.Signals(number).name
    if phase == "start" or (phase == "evaluation" and step == 0):
        return f"stopping ({name}): no step was trained since the start, so there is nothing to save"
    if phase == "end":
        return f"stopping ({name}): all steps are done; the run is ending"
    first = {
        "step": f"step {step + 1} is finished and saved first",
        "evaluation": f"the evaluation is abandoned after its current batch, then step {step} is saved",
        "save": f"the checkpoint of step {step} is finished first",
    }[phase]
    again = "press Ctrl-C again" if number == signal.SIGINT else "send the signal again"
    return f"stopping ({name}): {first}; {again} to end at once, without saving"


class StopOnSignal(TrainerCallback):
    """Stops a run when it gets a signal. `stopped_by` is the signal, the same on all ranks, once they have
    agreed to stop."""

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._received = 0  # the first signal
        self._phase: Phase = "start"
        self._state: Any = None
        self._lock = Lock()
        self._closed = Event()
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None

    def listen(self) -> None:
        """Receive signals until `close` is called. Call this in the main thread."""
        reading, writing = self._pipe = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _ignore_signal) for number in SIGNALS}
        Thread(target=self._receive, args=(reading,), daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        if self._pipe is not None:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(-1)
            os.close(self._pipe[1])  # ends the thread
            self._pipe = None

    def agree_to_stop(self) -> bool:
        """Return True, on all ranks, if any of them was asked to stop. It is one small collective."""
        if self.stopped_by is None:
            self.stopped_by = max_over_ranks(self._received) or None
        return self.stopped_by is not None

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Mark that the run is in this phase until the end of the block."""
        with ExitStack() as end:
            end.callback(setattr, self, "_phase", self._phase)
            self._phase = phase
            yield

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the start phase, unless a signal has interrupted it. This callback has to be the last one."""
        self._state = state
        with self._lock:
            self._phase = "start" if self._received else "step"
        if self.agree_to_stop():
            raise Stopped

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.agree_to_stop():
            control.should_save = True
            control.should_evaluate = False
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._phase = "end"

    def _receive(self, reading: int) -> None:
        """Handle signals from the pipe until it is closed."""
        first = 0.0
        while received := os.read(reading, 1):
            number = received[0]
            if number not in SIGNALS or (self._received and time.monotonic() - first < SAME):
                continue
            if self._received:
                _write(f"{signal.Signals(number).name}: ended at once, without saving")
                os._exit(128 + number)
            first = time.monotonic()
            with self._lock:
                self._received, phase = number, self._phase
            _write(stop_line(number, phase, self._state.global_step if self._state else 0))
            if phase == "start":
                Thread(target=self._interrupt_start, args=(number,), daemon=True).start()
        os.close(reading)

    def _interrupt_start(self, number: int) -> None:
        """End a run that has not begun its first step. Child processes are killed, so that the start fails and
        cleans up by itself, on all ranks."""
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if _kill_children() or several:
            self._closed.wait(START_GRACE)
        if not self._closed.is_set():
            os._exit(exit_code(number))


def _ignore_signal(*_: object) -> None:
    """Do nothing. The signal reaches `StopOnSignal` through the pipe."""


def _kill_children() -> int:
    """Kill the child processes, and return how many there were. Python's resource tracker is spared: it cleans
    up after the others and ends with this process."""
    import psutil

    killed = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in child.cmdline()):
                child.kill()
                killed += 1
    return killed


def _write(line: str) -> None:
    """Print a line at once, bypassing buffers and locks. Only the first rank of a machine prints."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):  # standard error is closed
            os.write(2, f"\n{line}\n".encode())
