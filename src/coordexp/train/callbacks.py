"""Callbacks of a run: the first weight sync, the metrics file, TensorBoard, the progress bar, warnings."""

import functools
import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, WandbCallback

from coordexp.errors import DataError, UserError, explain
from coordexp.files import BestEffort, append_line, drop_torn_line, json_object, write_whole
from coordexp.ranks import RankLostError, together
from coordexp.rollout.backend import RolloutBackend, Weights
from coordexp.tasks import TELL_EVERY_S, describe_progress
from coordexp.train.stopping import StopOnSignal, Stopped

QUIET = 2.0  # seconds of an evaluation before its progress is shown
RETRY = 60.0  # seconds after which writing TensorBoard events is tried again on a full disk
WANDB_ID = "wandb-run-id"  # in the run folder


def say(message: str) -> None:
    """Print a message for the user to standard error."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(message, markup=False)


class FirstSync(TrainerCallback):
    """Starts the engine and sends it the weights before the first step, so that a problem with it is reported
    early. A start that fails because a signal has stopped the run is not an error."""

    def __init__(self, backend: RolloutBackend, weights: Weights, stop: StopOnSignal) -> None:
        self.backend, self.weights, self.stop = backend, weights, stop

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        try:
            together(functools.partial(self._sync, state.global_step))
        except RankLostError:  # the ranks cannot agree any more
            raise
        except Exception:  # it is raised on all ranks or on none
            if self.stop.agree_to_stop():
                raise Stopped from None
            raise

    def _sync(self, version: int) -> None:
        with self.backend.session():
            self.backend.sync(self.weights, version)


def cut_metrics(path: Path, step: int) -> float:
    """Drop the lines of later steps, which the resumed run writes again, and a last line that a crash left torn.
    Return the seconds that the run had taken at the last line that stays. The file is truncated, not rewritten:
    that needs no disk space, and a crash cannot leave it half done."""
    if not path.is_file():
        return 0.0
    if drop_torn_line(path):
        say(f"note: {path}: its last line was torn by a crash and is dropped")
    end, seconds = 0, 0.0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                values = json_object(line, f"{path}, line {number}")
                at, taken = int(values["step"]), float(values["seconds"])
            except (DataError, KeyError, TypeError, ValueError) as error:
                reason = error if isinstance(error, DataError) else f"{path}, line {number}: no step and seconds"
                raise DataError(
                    str(reason), "remove that line, or move the file away: the run continues without it"
                ) from error
            if at > step:
                break
            end, seconds = end + len(line), taken
    os.truncate(path, end)
    return seconds


class MetricsFile(TrainerCallback):
    """Writes everything that is logged to `metrics.jsonl`, one JSON object per line. A resumed run continues the
    same file. If the disk is full, lines are lost and the run continues."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before = 0.0  # seconds that the run had taken before it was resumed
        self._start = time.time()
        self._writes = BestEffort("metrics", say)

    def begin(self, step: int) -> None:
        """Prepare the file for a run that begins or resumes after `step`. To be called on rank 0."""
        self._before = cut_metrics(self.path, step)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._start = time.time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs:
            seconds = round(self._before + time.time() - self._start, 3)
            values = {name: value if math.isfinite(value) else None for name, value in logs.items()}
            line = json.dumps({"step": state.global_step, "seconds": seconds, **values})
            self._writes.attempt(functools.partial(append_line, self.path, line))


class TensorBoard(TensorBoardCallback):
    """The callback of transformers, except that if the disk is full, events are lost and the run continues. After
    an error its writer is useless: its thread has ended, and every call raises the same error. So a new attempt,
    at most one per minute, begins a new event file, which TensorBoard shows together with the others."""

    logging_dir: str | None

    def __init__(self) -> None:
        super().__init__()
        self._writes = BestEffort("TensorBoard events", say)
        self._not_before = 0.0
        self._repeated_from: int | None = None  # the first step that a resumed run repeats
        threading.excepthook = functools.partial(_report_thread_error, threading.excepthook)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step and self.logging_dir is None:
            self.logging_dir = find_event_folder(Path(args.output_dir))
            self._repeated_from = state.global_step + 1
        self._attempt(functools.partial(super().on_train_begin, args, state, control, **kwargs))

    def _init_summary_writer(self, args: Any) -> None:
        """Open a writer. TensorBoard hides older events of the steps that are repeated."""
        self.tb_writer = self._SummaryWriter(log_dir=self.logging_dir, purge_step=self._repeated_from)
        self._repeated_from = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._attempt(functools.partial(super().on_log, args, state, control, logs=logs, **kwargs))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attempt(functools.partial(super().on_train_end, args, state, control, **kwargs))

    def _attempt(self, write: Callable[[], None]) -> None:
        if time.monotonic() >= self._not_before and not self._writes.attempt(write):
            self.tb_writer, self._not_before = None, time.monotonic() + RETRY


def find_event_folder(run: Path) -> str | None:
    """Return the folder of the newest TensorBoard events of a run, or None if there are none."""
    events = sorted(run.glob("runs/*/events.out.tfevents.*"), key=lambda file: file.stat().st_mtime)
    return str(events[-1].parent) if events else None


class Wandb(WandbCallback):
    """The callback of transformers, except that a resumed run continues the run of Weights & Biases that it began,
    and that an error at the start is one that the user can fix. The id of that run is in the run folder."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        begin = functools.partial(super().on_train_begin, args, state, control, **kwargs)
        together(functools.partial(self._begin, begin, args, state))

    def _begin(self, begin: Callable[[], None], args: Any, state: Any) -> None:
        file, is_first = Path(args.output_dir) / WANDB_ID, state.is_world_process_zero
        fix = (
            "run `wandb login`, or set WANDB_API_KEY; WANDB_MODE=offline writes files that `wandb sync` sends "
            "later, and training.report_to: tensorboard needs no account"
        )
        with explain(self._wandb.Error, "training.report_to: wandb", fix, to=UserError):
            if is_first and state.global_step and file.is_file() and "WANDB_RUN_ID" not in os.environ:
                project = os.environ.get("WANDB_PROJECT", "huggingface")  # as in transformers
                run_id = file.read_text(encoding="utf-8").strip()
                self._wandb.init(project=project, name=args.run_name, id=run_id, resume="allow")
            begin()
        if is_first:
            write = functools.partial(write_whole, file, f"{self._wandb.run.id}\n")
            BestEffort("ids of Weights & Biases", say).attempt(write)


def _report_thread_error(report: Callable[[Any], object], failure: Any) -> None:
    """Report an exception that ended a thread, except TensorBoard's, about which the callback itself warns."""
    if type(failure.thread).__name__ != "_AsyncWriterThread" or not isinstance(failure.exc_value, OSError):
        report(failure)


class Bar(TrainerCallback):
    """The progress bar: steps, rate, time left and loss, with the results of evaluations above it. In a log, plain
    lines."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: Any = None
        self._description = "training"
        self._evaluating_since = self._show_at = 0.0  # when the progress of an evaluation is shown next

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self._progress = Progress(*columns)
        self._task = self._progress.add_task(
            self._description, total=state.max_steps, completed=state.global_step, rate=""
        )
        self._start = time.time(), state.global_step
        if self._progress.console.is_terminal:
            self._progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._progress is not None:
            since, first = self._start
            rate = (time.time() - since) / max(1, state.global_step - first)
            self._progress.update(self._task, completed=state.global_step, rate=f"{rate:.2f} s/step")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if self._progress is None or not logs:
            return
        if "loss" in logs:
            self._description = f"loss {logs['loss']:.4f}"
            self._progress.update(self._task, description=self._description)
        results = "  ".join(
            f"{name.removeprefix('eval_')} {value:.3f}"
            for name, value in logs.items()
            if name in ("eval_f1_50", "eval_recall_50", "eval_precision_50", "eval_ap")
            or name.startswith("eval_accuracy_")
        )
        if results:
            self._progress.console.print(f"step {state.global_step}: {results}")
        elif "loss" in logs and (summary := summarise_rollouts(logs)):
            self._progress.console.print(f"step {state.global_step}/{state.max_steps}  {summary}", soft_wrap=True)
        elif not self._progress.console.is_terminal and "loss" in logs:
            self._progress.console.print(f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}")

    def show_evaluation(self, done: int, total: int) -> None:
        """Show how many images of an evaluation are done, beginning with 0: in the bar, or in a log as a line
        now and then. A short evaluation is not shown."""
        if self._progress is None:
            return
        now, text = time.monotonic(), f"evaluating {done:,} of {total:,}"
        if done == 0:
            self._evaluating_since, self._show_at = now, now + QUIET
        elif done >= total:
            self._progress.update(self._task, description=self._description)
        elif now >= self._show_at and self._progress.console.is_terminal:
            self._progress.update(self._task, description=text)
        elif now >= self._show_at:
            self._show_at = now + TELL_EVERY_S
            rate = done / (now - self._evaluating_since)
            self._progress.console.print(describe_progress("evaluating", done, total, rate))

    def close(self) -> None:
        """Leave the terminal as it was, however the run ends."""
        if self._progress is not None:
            self._progress.stop()


def summarise_rollouts(logs: dict[str, float]) -> str | None:
    """Return one line on the rollouts, their correction, and where the time went. Return None if there were
    none."""
    if "rollout/answers" not in logs:
        return None
    true, matched = int(logs["match/true"]), int(logs["match/matched"])
    odd = {
        "invalid": logs["parse/invalid"],
        "unreadable": logs["rollout/unreadable"],
        "cut off": logs["rollout/cut_off"],
        "looped": logs["rollout/looped"],
    }
    spent = {name: logs.get(f"time/{name}", 0.0) for name in ("sync", "rollout", "compute", "waited")}
    times = [f"{name} {seconds:.1f}" for name, seconds in spent.items() if name != "sync" or seconds >= 0.05]
    parts = [
        f"loss {logs['loss']:.4f}",
        f"{int(logs['rollout/answers'])} answers: found {matched} of {true}, {int(logs['match/extra'])} extra",
        *(f"{int(count)} {name}" for name, count in odd.items() if count),
    ]
    return f"{', '.join(parts)}  [{logs.get('time/step', 0.0):.1f} s: {', '.join(times)}]"


class FillWarning(TrainerCallback):
    """Warns when packed rows are filled less than `packing_min_fill_ratio`, on average over the rows of all ranks
    between two log lines. It warns once, and again only if rows were full enough in between."""

    def __init__(self, min_fill_ratio: float) -> None:
        self._min_fill_ratio = min_fill_ratio
        self._warned = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs or "packing/fill" not in logs:
            return
        underfull = logs["packing/fill"] < self._min_fill_ratio
        if underfull and not self._warned:
            fill, waiting = logs["packing/fill"], logs["packing/waiting"]
            say(fill_warning(state.global_step, fill, waiting, self._min_fill_ratio))
        self._warned = underfull


def fill_warning(step: int, fill: float, waiting: float, min_fill_ratio: float) -> str:
    """Return the warning, with advice that depends on whether segments are waiting."""
    advice = (
        "few segments wait for a row: start a new run with a larger training.per_device_train_batch_size or a "
        "smaller global_max_length"
        if waiting < 1
        else f"{waiting:.1f} segments are waiting because they did not fit: start a new run with a larger "
        "global_max_length, so that more of them share a row"
    )
    return (
        f"warning: step {step}: packed rows are filled to {fill:.3f} on average, and "
        f"training.packing_min_fill_ratio is {min_fill_ratio:g}; {advice}"
    )
