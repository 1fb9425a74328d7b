"""The metrics of the learner for Prometheus: a file in the run folder, in the format of its textfile collectors.

A file needs no port and no token, and it tells of a run that has ended, too. It has numbers and the name of the
run folder, and nothing else of the config.
"""

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from coordexp.files import BestEffort, write_whole
from coordexp.train.callbacks import say

FILE = "metrics.prom"
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


class LearnerMetrics(TrainerCallback):
    """Writes the file on rank 0: when the run begins, after every step, at every line of the log, and at the end.
    If the disk is full, the file keeps its content and the run continues. `count_taken` returns how many samples
    this rank has taken: with packing, that is not the same number in every step."""

    def __init__(self, folder: Path, count_taken: Callable[[], int]) -> None:
        self._path = folder / FILE
        self._run = str(folder)
        self._values: dict[str, float] = {}
        self._count_taken, self._taken_before = count_taken, 0
        self._lock = threading.Lock()  # several threads ask servers, and count
        self._writes = BestEffort("metrics for Prometheus", say)

    def count(self, event: dict[str, Any]) -> None:
        """Count an event of the rollout servers, as it stands in `servers.jsonl`."""
        if event["event"] == "rollouts":
            lost = sum(call["count"] for call in event["calls"] if call.get("lost"))
            made = sum(call["count"] for call in event["calls"]) - lost
            self._add({"rollouts_total": made, "rollouts_lost_total": lost})
        elif event["event"] == "sync":
            self._add({"syncs_failed_total": len(event["failed"])})
            self._values["servers"] = len(event["synced"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._taken_before = self._count_taken()
        self._values |= {"running": 1, "max_steps": state.max_steps}
        self._note_step(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note_step(args, state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self._values["loss"] = logs["loss"]
            self._write(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._values["running"] = 0
        self._write(state)

    def _note_step(self, args: Any, state: Any) -> None:
        self._values |= {"step": state.global_step, "last_step_timestamp_seconds": time.time()}
        self._values["samples_total"] = (self._count_taken() - self._taken_before) * args.world_size
        self._write(state)

    def _add(self, counts: dict[str, int]) -> None:
        with self._lock:
            for name, count in counts.items():
                self._values[name] = self._values.get(name, 0) + count

    def _write(self, state: Any) -> None:
        if state.is_world_process_zero:
            text = to_prometheus(self._values, self._run)
            self._writes.attempt(partial(write_whole, self._path, text, durable=False))


def to_prometheus(values: dict[str, float], run: str) -> str:
    """Return the values in Prometheus' text format, labelled with the name of their run."""
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = []
    for name, (kind, description) in HELP.items():
        if name in values:
            metric = f"coordexp_learner_{name}"
            lines += [f"# HELP {metric} {description}", f"# TYPE {metric} {kind}"]
            lines.append(f'{metric}{{run="{label}"}} {_to_number(values[name])}')
    return "\n".join(lines) + "\n"


def _to_number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
