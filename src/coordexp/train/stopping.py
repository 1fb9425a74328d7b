"""How SIGTERM and Ctrl-C end a run: what it does when the signal comes decides what is finished first.

A thread hears the signals, because Python runs a signal handler only when the main thread is back from whatever it
does, which may be a collective that waits for another rank. All ranks end at the same step, whichever of them got
the signal.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from typing import Any, Literal

from transformers import TrainerCallback

from coordexp.ranks import max_over_ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME = 1.0  # seconds in which more signals count as the same one: a scheduler and torchrun may both send it
START_GRACE = 15.0  # seconds for a start that was cut off to clean up, before the process ends regardless
Phase = Literal["start", "step", "evaluation", "save", "end"]


class Stopped(Exception):
    """The run was asked to stop, and what it was doing is abandoned."""


def exit_code(number: int) -> int:
    """Return the exit code of a run that a signal has ended in good order."""
    return 128 + number if number == signal.SIGINT else 0


def stop_line(number: int, phase: Phase, step: int) -> str:
    """Return the line that is printed when the signal comes. `step` is the last one that is done."""
    name = signal.Signals(number).name
    if phase == "start" or (phase == "evaluation" and step == 0):
        return f"stopping ({name}): no step was trained yet, so there is nothing to save"
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
    """`stopped_by` is the signal, the same on all ranks, once they have agreed to stop."""

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._heard = 0
        self._phase: Phase = "start"
        self._state: Any = None
        self._lock = Lock()
        self._closed = Event()
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None

    def listen(self) -> None:
        """Hear the signals from here on, until `close`. To be called in the main thread."""
        reading, writing = self._pipe = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        Thread(target=self._hear, args=(reading,), daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        if self._pipe is not None:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(-1)
            os.close(self._pipe[1])  # ends the thread
            self._pipe = None

    def agreed(self) -> bool:
        """Return True, on all ranks, if any of them was asked to stop. One small collective."""
        if self.stopped_by is None:
            self.stopped_by = max_over_ranks(self._heard) or None
        return self.stopped_by is not None

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The start is over, unless it is being cut off. This callback has to be the last one."""
        self._state = state
        with self._lock:
            self._phase = "start" if self._heard else "step"
        if self.agreed():
            raise Stopped

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.agreed():
            control.should_save = True
            control.should_evaluate = False
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._phase = "end"

    def _hear(self, reading: int) -> None:
        first = 0.0
        while heard := os.read(reading, 1):
            number = heard[0]
            if number not in SIGNALS or (self._heard and time.monotonic() - first < SAME):
                continue
            if self._heard:
                _write(f"{signal.Signals(number).name}: ended at once, without saving")
                os._exit(128 + number)
            first = time.monotonic()
            with self._lock:
                self._heard, phase = number, self._phase
            _write(stop_line(number, phase, self._state.global_step if self._state else 0))
            if phase == "start":
                Thread(target=self._cut_off_start, args=(number,), daemon=True).start()
        os.close(reading)

    def _cut_off_start(self, number: int) -> None:
        """End the start of a run. If it has started processes, they are killed, so that the start fails and cleans
        up by itself, on all ranks."""
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if _kill_children() or several:
            self._closed.wait(START_GRACE)
        if not self._closed.is_set():
            os._exit(exit_code(number))


def _kill_children() -> int:
    """Kill the processes below this one, and return how many. Python's resource tracker stays: it cleans up after
    the others, and ends with this process."""
    import psutil

    killed = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in child.cmdline()):
                child.kill()
                killed += 1
    return killed


def _write(line: str) -> None:
    """Print a line at once, past all buffers and locks. Of the ranks of a machine, the first one prints."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):  # nobody reads it any more
            os.write(2, f"\n{line}\n".encode())
