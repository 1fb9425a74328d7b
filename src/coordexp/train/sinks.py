"""Where a run reports to: `metrics.jsonl`, which is the truth, TensorBoard, Weights & Biases, a file for
Prometheus, and the terminal. All of them are a `Sink`, and `Sinks` passes on to them what the Trainer reports.
"""

import itertools
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from coordexp.errors import DataError, UserError, explain
from coordexp.files import BestEffort, append_line, drop_torn_line, json_object, write_whole
from coordexp.logs import say
from coordexp.ranks import together
from coordexp.train.pictures import COLUMNS, Shown, describe_objects, draw_objects, escape_markdown
from coordexp.train.stream import RowStream

WANDB_ID = "wandb-run-id"  # in the run folder
PROMETHEUS = "metrics.prom"
HELP = {
    "running": ("gauge", "1 while the run trains, 0 after its end"),
    "step": ("gauge", "The latest optimizer step"),
    "max_steps": ("gauge", "The last step of the run"),
    "last_step_timestamp_seconds": ("gauge", "When the latest step ended, or when the run was started"),
    "loss": ("gauge", "The loss that was logged last"),
    "samples_total": ("counter", "Samples taken since the run was started: those of rank 0, times the ranks"),
    "rollouts_total": ("counter", "Rollouts that servers made for rank 0 since the run was started"),
    "rollouts_lost_total": ("counter", "Rollouts that rank 0 asked again because their server was lost"),
    "syncs_failed_total": ("counter", "Weight syncs that a server did not take"),
    "servers": ("gauge", "Servers that took the latest weights"),
}


class Sink:
    """A place that a run reports to, on rank 0. `state` is that of the Trainer, with `global_step` and
    `max_steps`."""

    content = "lines"  # a plural noun: what is lost if the disk is full

    def begin(self, state: Any) -> None:
        """The run begins, or is resumed."""

    def end_step(self, state: Any) -> None:
        """A step has ended."""

    def log(self, state: Any, values: dict[str, float]) -> None:
        """There are new metrics."""

    def show(self, state: Any, images: Sequence[Shown]) -> None:
        """An evaluation has answered these images."""

    def end(self, state: Any) -> None:
        """The run has ended."""


class Sinks(TrainerCallback):
    """Passes on what the Trainer reports, on rank 0. If the disk is full, what is written is lost, with a warning
    for each sink, and the run continues."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = [(sink, BestEffort(sink.content, say)) for sink in sinks]
        self._state: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._state = state
        together(self._begin)

    def _begin(self) -> None:
        """Let the sinks begin. One that cannot is left out."""
        if self._state.is_world_process_zero:
            ready = [writes.attempt(partial(sink.begin, self._state)) for sink, writes in self._sinks]
            self._sinks = [*itertools.compress(self._sinks, ready)]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tell("end_step")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs:
            self._tell("log", logs)

    def show(self, images: Sequence[Shown]) -> None:
        """Show the images of an evaluation."""
        self._tell("show", images)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tell("end")

    def _tell(self, event: str, *values: Any) -> None:
        for sink, writes in self._sinks if self._state.is_world_process_zero else ():
            writes.attempt(partial(getattr(sink, event), self._state, *values))


class MetricsFile(Sink):
    """Writes everything that is logged to `metrics.jsonl`, one JSON object per line. A resumed run continues the
    same file."""

    content = "metrics"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before = 0.0  # seconds that the run had taken before it was resumed
        self._start = time.time()

    def cut(self, step: int) -> None:
        """Prepare the file for a run that begins or resumes after `step`."""
        self._before = cut_metrics(self.path, step)

    def begin(self, state: Any) -> None:
        self._start = time.time()

    def log(self, state: Any, values: dict[str, float]) -> None:
        seconds = round(self._before + time.time() - self._start, 3)
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        append_line(self.path, json.dumps({"step": state.global_step, "seconds": seconds, **finite}))


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


def _name_for_trackers(name: str) -> str:
    """Return the name of a metric as transformers writes it to trackers, so that runs can be compared."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


class TensorBoard(Sink):
    """Events in `runs/` of the run folder. A resumed run continues in the same folder. After a full disk, the
    writer takes nothing any more until the run is resumed."""

    content = "TensorBoard events"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.writer: Any = None

    def begin(self, state: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        events = sorted(self._folder.glob("runs/*/events.out.tfevents.*"), key=lambda file: file.stat().st_mtime)
        folder = self._folder / "runs" / f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"
        repeated_from = None
        if state.global_step and events:
            folder, repeated_from = events[-1].parent, state.global_step + 1  # TensorBoard hides what is repeated
        threading.excepthook = partial(_show_error, threading.excepthook)
        self.writer = SummaryWriter(str(folder), purge_step=repeated_from)

    def log(self, state: Any, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(_name_for_trackers(name), value, state.global_step)
        self.writer.flush()

    def show(self, state: Any, images: Sequence[Shown]) -> None:
        rows = [COLUMNS, tuple("---" for _ in COLUMNS)]
        for number, (image, report, question) in enumerate(images):
            drawn = np.asarray(draw_objects(image, report))
            self.writer.add_image(f"evaluation/{number}", drawn, state.global_step, dataformats="HWC")
            cells = (f"evaluation/{number}", question, *describe_objects(report))
            rows.append(tuple(map(escape_markdown, cells)))
        self.writer.add_text("evaluation", "\n".join(map(" | ".join, rows)), state.global_step)
        self.writer.flush()

    def end(self, state: Any) -> None:
        self.writer.close()


def _show_error(show: Callable[[Any], object], error: Any) -> None:
    """Show the error of a thread, unless TensorBoard's writer has ended: its next call raises that error."""
    if type(error.thread).__module__ != "tensorboard.summary.writer.event_file_writer":
        show(error)


class Wandb(Sink):
    """A run of Weights & Biases. A resumed run continues it: its id is in the run folder. An error at the start is
    one that the user can fix."""

    content = "results for Weights & Biases"

    def __init__(self, folder: Path, name: str | None, settings: dict[str, Any]) -> None:
        self._folder, self._name, self._settings = folder, name, settings
        self._run: Any = None

    def begin(self, state: Any) -> None:
        import wandb

        file = self._folder / WANDB_ID
        is_resumed = bool(state.global_step) and file.is_file() and "WANDB_RUN_ID" not in os.environ
        resumed: dict[str, Any] = {}
        if is_resumed:
            resumed = {"id": file.read_text(encoding="utf-8").strip(), "resume": "allow"}
        fix = (
            "run `wandb login`, or set WANDB_API_KEY; WANDB_MODE=offline writes files that `wandb sync` sends "
            "later, and training.report_to: tensorboard needs no account"
        )
        with explain(wandb.Error, "training.report_to: wandb", fix, to=UserError):
            project = os.environ.get("WANDB_PROJECT", "huggingface")  # as in transformers
            self._run = wandb.init(project=project, name=self._name, config=self._settings, **resumed)
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step", step_sync=True)
        write_whole(file, f"{self._run.id}\n")

    def log(self, state: Any, values: dict[str, float]) -> None:
        named = {_name_for_trackers(name): value for name, value in values.items()}
        self._run.log(named | {"train/global_step": state.global_step})

    def show(self, state: Any, images: Sequence[Shown]) -> None:
        import wandb

        rows = [
            [wandb.Image(draw_objects(image, report), caption=question), question, *describe_objects(report)]
            for image, report, question in images
        ]
        table = wandb.Table(columns=list(COLUMNS), data=rows)
        pictures = [row[0] for row in rows]
        self._run.log({"eval/images": pictures, "eval/answers": table, "train/global_step": state.global_step})


class PrometheusFile(Sink):
    """The metrics of the learner in the format of Prometheus' textfile collectors: `metrics.prom` in the run
    folder.

    A file needs no port and no token, and it tells of a run that has ended, too. It has numbers and the name of
    the run folder, and nothing else of the config. It is written when the run begins, after every step, at every
    line of the log, and at the end."""

    content = "metrics for Prometheus"

    def __init__(self, folder: Path, stream: RowStream) -> None:
        self._path, self._run, self._stream = folder / PROMETHEUS, str(folder), stream
        self._values: dict[str, float] = {}
        self._taken_before = 0
        self._lock = threading.Lock()  # several threads ask servers, and count

    def count(self, event: dict[str, Any]) -> None:
        """Count an event of the rollout servers, as it stands in `servers.jsonl`."""
        if event["event"] == "rollouts":
            lost = sum(call["count"] for call in event["calls"] if call.get("lost"))
            made = sum(call["count"] for call in event["calls"]) - lost
            self._add({"rollouts_total": made, "rollouts_lost_total": lost})
        elif event["event"] == "sync":
            self._add({"syncs_failed_total": len(event["failed"])})
            self._values["servers"] = len(event["synced"])

    def begin(self, state: Any) -> None:
        self._taken_before = self._stream.taken
        self._values |= {"running": 1, "max_steps": state.max_steps}
        self.end_step(state)

    def end_step(self, state: Any) -> None:
        self._values |= {"step": state.global_step, "last_step_timestamp_seconds": time.time()}
        taken = self._stream.taken - self._taken_before  # with packing, steps take more or less
        self._values["samples_total"] = taken * self._stream.order.ranks
        self._write()

    def log(self, state: Any, values: dict[str, float]) -> None:
        if "loss" in values:
            self._values["loss"] = values["loss"]
            self._write()

    def end(self, state: Any) -> None:
        self._values["running"] = 0
        self._write()

    def _add(self, counts: dict[str, int]) -> None:
        with self._lock:
            for name, count in counts.items():
                self._values[name] = self._values.get(name, 0) + count

    def _write(self) -> None:
        write_whole(self._path, to_prometheus(self._values, self._run), durable=False)


def to_prometheus(values: dict[str, float], run: str) -> str:
    """Return the values in Prometheus' text format, labelled with the name of their run."""
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = []
    for name, (kind, description) in HELP.items():
        if name in values:
            metric, value = f"coordexp_learner_{name}", values[name]
            number = (
                repr(value) if math.isfinite(value) else {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
            )
            lines += [f"# HELP {metric} {description}", f"# TYPE {metric} {kind}"]
            lines.append(f'{metric}{{run="{label}"}} {number}')
    return "\n".join(lines) + "\n"
