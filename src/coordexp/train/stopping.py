"""What stops a run before its last step: SIGTERM, Ctrl-C, and a value that is NaN or infinite.

A run finishes its step or its save first, and abandons an evaluation. A thread receives the signals, because
Python runs a signal handler only when the main thread returns to the interpreter, and it may be in a collective
that waits for another rank. All ranks stop after the same step, whichever of them got the signal.

Whether a run has diverged is a pure function of numbers that are reduced over all ranks, so the decision is the
same on every rank. Weights that are not finite are not saved.
"""

import math
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Any

from torch import nn
from transformers import TrainerCallback

from coordexp.errors import UserError
from coordexp.objective.split import FENCE
from coordexp.ranks import gather_texts, max_over_ranks
from coordexp.rollout.weights import find_non_finite
from coordexp.train.offload import to_local

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME = 1.0  # seconds within which further signals count as the same one: a scheduler and torchrun may both send it
START_GRACE = 15.0  # seconds for ranks to stop together before their first step; then they exit regardless


class Stopped(Exception):
    """The run was asked to stop, and abandons what it was doing."""


def exit_code(number: int) -> int:
    """Return the exit code of a run that stopped in an orderly way because of a signal."""
    return 128 + number if number == signal.SIGINT else 0


def stop_line(number: int) -> str:
    """Return the line that is printed when a signal arrives."""
    again = "press Ctrl-C again" if number == signal.SIGINT else "send the signal again"
    return (
        f"stopping ({signal.Signals(number).name}): the run saves what it has trained, if that is not saved yet; "
        f"{again} to end at once, without saving"
    )


class StopOnSignal(TrainerCallback):
    """Stops a run when it gets a signal. `stopped_by` is the signal, the same on all ranks, once they have
    agreed to stop."""

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._received = 0  # the first signal
        self._is_starting = True
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

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the start phase, unless a signal has interrupted it. This callback has to be the last one."""
        with self._lock:
            self._is_starting = bool(self._received)
        if self.agree_to_stop():
            raise Stopped

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.agree_to_stop():
            control.should_save = True
            control.should_evaluate = False
            control.should_training_stop = True

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
                self._received, is_starting = number, self._is_starting
            _write(stop_line(number))
            if is_starting:
                Thread(target=self._interrupt_start, args=(number,), daemon=True).start()
        os.close(reading)

    def _interrupt_start(self, number: int) -> None:
        """End a run that has not begun its first step. Several ranks get some time to stop together."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            self._closed.wait(START_GRACE)
        if not self._closed.is_set():
            os._exit(exit_code(number))


def _ignore_signal(*_: object) -> None:
    """Do nothing. The signal reaches `StopOnSignal` through the pipe."""


def _write(line: str) -> None:
    """Print a line at once, bypassing buffers and locks. Only the first rank of a machine prints."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):  # standard error is closed
            os.write(2, f"\n{line}\n".encode())


# A diverged model has broken logits at every step. A single odd image may cause them at one.
MAX_BROKEN_STEPS = 5
# The gradient scaler of fp16 skips a step whose gradient overflows, and halves its scale, which starts at 65,536.
# After this many steps in a row the scale is below 1: the gradient itself overflows.
MAX_SKIPPED_STEPS = 20

WAY_OUT = (
    "lower training.learning_rate, lengthen training.warmup_steps or lower training.max_grad_norm; train in "
    "bfloat16 or float32 instead of float16; look at the data with `coordexp data doctor`. --resume keeps the "
    "learning rate of the checkpoint: to change it, start a new run with model.path at a checkpoint"
)


class DivergenceError(UserError):
    """A loss term, a gradient norm or a weight is not finite, or logits stay broken."""


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one optimizer step over all ranks. `step` is counted as in the log. `grad_norm` is None
    where it is not known. `scaled` is True if a gradient scaler skips steps whose gradient overflows."""

    step: int
    terms: Mapping[str, float]
    grad_norm: float | None
    broken_logits: int
    scaled: bool = False


@dataclass(frozen=True)
class Health:
    """How many of the latest steps, in a row, had broken logits, and how many the gradient scaler skipped."""

    broken_steps: int = 0
    skipped_steps: int = 0

    def after(self, numbers: StepNumbers, advice: str = "") -> "Health":
        """Return the health after this step. Raise DivergenceError, with `advice` in its fix, if the run must
        stop."""
        broken = self.broken_steps + 1 if numbers.broken_logits else 0
        overflows = numbers.grad_norm is not None and not math.isfinite(numbers.grad_norm)
        skipped = self.skipped_steps + 1 if overflows and numbers.scaled else 0
        problem = ""
        if infinite := [(name, value) for name, value in numbers.terms.items() if not math.isfinite(value)]:
            terms = ", ".join(f"{name} is {_name_value(value)}" for name, value in infinite)
            problem = f"the loss is not finite: {terms}"
        elif overflows and not numbers.scaled:
            problem = f"the gradient norm is {_name_value(numbers.grad_norm)}"
        elif skipped >= MAX_SKIPPED_STEPS:
            problem = f"the gradient norm is {_name_value(numbers.grad_norm)} for {skipped} steps in a row"
        elif broken >= MAX_BROKEN_STEPS:
            problem = f"logits were broken in {broken} steps in a row"
        if problem:
            logits = f" ({describe_broken(numbers.broken_logits)})" if numbers.broken_logits else ""
            fix = f"{WAY_OUT}. {advice}" if advice else WAY_OUT
            raise DivergenceError(f"step {numbers.step}: {problem}{logits}; the run stops", fix)
        return Health(broken, skipped)


def describe_broken(count: int) -> str:
    """Return a text for this many broken logits."""
    return f"{count:,} logits were NaN, infinite or beyond +-{FENCE:,.0f}"


def _name_value(value: float | None) -> str:
    return {"nan": "NaN", "inf": "Inf", "-inf": "-Inf"}[str(value)]


def check_weights(model: nn.Module, step: int) -> None:
    """Raise DivergenceError, on all ranks, if a trained weight is not finite on any of them. Each rank checks
    its own shard of a sharded weight."""
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    own = find_non_finite((name, to_local(weight)) for name, weight in trained)
    if name := next(filter(None, gather_texts(own or "")), None):
        raise DivergenceError(
            f"step {step}: the weight {name} has NaN or infinite values after the update; it is not saved, and "
            "the run stops",
            WAY_OUT,
        )
