"""What a run shows in the terminal: a progress bar, the results, and warnings about answers that run away and
about rows that are not full."""

import time
from collections import Counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from coordexp.logs import say, writes_records
from coordexp.tasks import TELL_EVERY_S, describe_progress
from coordexp.train.sinks import Sink

QUIET = 2.0  # seconds of an evaluation before its progress is shown
WINDOW = 200  # answers after which they are judged
ODD_SHARE = 0.1  # of the answers or of their objects, from which they run away
READY_RECALL = 0.4  # of the labelled objects that the first answers find, without class
COUNTED = (
    *("rollout/answers", "rollout/cut_off", "rollout/looped", "rollout/unreadable"),
    *("parse/objects", "parse/valid", "parse/invalid", "target/duplicates_removed"),
    *("match/true", "match/matched"),
)
NOT_READY = (
    "Stage 1 is not ready for rollouts: train it longer, or raise rollout_matching.max_new_tokens if sound "
    "answers are cut off"
)
RUN_AWAY = (
    "the answers run away: lower training.learning_rate, or train on the ground truth in most steps "
    "(custom.trainer_variant: stage2_two_channel with stage2.b_ratio: 0.25)"
)
RESULTS = ("eval_f1_50", "eval_recall_50", "eval_precision_50", "eval_ap")


class Bar(Sink):
    """The progress bar: steps, rate, time left and loss, with the results of evaluations above it. In a log, plain
    lines."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._on_terminal = False  # else in a log
        self._task: Any = None
        self._description = "training"
        self._evaluating_since = self._show_at = 0.0  # when the progress of an evaluation is shown next

    def begin(self, state: Any) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self._progress = Progress(*columns, console=Console(soft_wrap=True))
        self._task = self._progress.add_task(
            self._description, total=state.max_steps, completed=state.global_step, rate=""
        )
        self._start = time.time(), state.global_step
        self._on_terminal = self._progress.console.is_terminal and not writes_records()
        if self._on_terminal:
            self._progress.start()

    def end_step(self, state: Any) -> None:
        assert self._progress is not None
        since, first = self._start
        rate = (time.time() - since) / max(1, state.global_step - first)
        self._progress.update(self._task, completed=state.global_step, rate=f"{rate:.2f} s/step")

    def log(self, state: Any, values: dict[str, float]) -> None:
        assert self._progress is not None
        show, step = self._progress.console.print if self._on_terminal else say, state.global_step
        if "loss" in values:
            self._description = f"loss {values['loss']:.4f}"
            self._progress.update(self._task, description=self._description)
        results = "  ".join(
            f"{name.removeprefix('eval_')} {value:.3f}"
            for name, value in values.items()
            if name in RESULTS or name.startswith("eval_accuracy_")
        )
        if results:
            show(f"step {step}: {results}")
        elif "loss" in values and (summary := summarise_rollouts(values)):
            show(f"step {step}/{state.max_steps}  {summary}")
        elif not self._on_terminal and "loss" in values:
            show(f"step {step}/{state.max_steps}  loss {values['loss']:.4f}")

    def show_evaluation(self, done: int, total: int) -> None:
        """Show how many images of an evaluation are done, beginning with 0: in the bar, or in a log as a line
        now and then. A short evaluation is not shown."""
        if self._progress is None:  # on other ranks
            return
        now, text = time.monotonic(), f"evaluating {done:,} of {total:,}"
        if done == 0:
            self._evaluating_since, self._show_at = now, now + QUIET
        elif done >= total:
            self._progress.update(self._task, description=self._description)
        elif now >= self._show_at and self._on_terminal:
            self._progress.update(self._task, description=text)
        elif now >= self._show_at:
            self._show_at = now + TELL_EVERY_S
            rate = done / (now - self._evaluating_since)
            say(describe_progress("evaluating", done, total, rate))

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


class AnswerWarning(Sink):
    """Warns when rollouts run away: when many answers of a window are cut off, loop or cannot be read, or many of
    their objects are invalid or duplicates. The first window, in which few objects may not have been found either,
    tells whether Stage 1 was ready. It warns once, and again only if a window was sound in between."""

    def __init__(self) -> None:
        self._sums = Counter[str]()
        self._is_first, self._warned = True, False

    def begin(self, state: Any) -> None:
        self._is_first = state.global_step == 0  # else the run is resumed

    def log(self, state: Any, values: dict[str, float]) -> None:
        if "rollout/answers" not in values:
            return
        self._sums.update({name: int(values[name]) for name in COUNTED})
        if self._sums["rollout/answers"] < WINDOW:
            return
        problems = describe_odd_answers(self._sums)
        recall = self._sums["match/matched"] / max(1, self._sums["match/true"])
        if self._is_first and self._sums["match/true"] and recall < READY_RECALL:
            problems.append(f"only {recall:.0%} of the labelled objects are found")
        if problems and not self._warned:
            advice = NOT_READY if self._is_first else RUN_AWAY
            count = f"{self._sums['rollout/answers']:,}"
            say(f"warning: step {state.global_step}: of the last {count} answers, {', '.join(problems)}; {advice}")
        # The first warning is about Stage 1, and does not stand for one that answers run away.
        self._is_first, self._warned = False, bool(problems) and not self._is_first
        self._sums.clear()


def describe_odd_answers(sums: Counter[str]) -> list[str]:
    """Return what is wrong with many answers, or with many of their objects. `sums` are counters of a window."""
    endless = sums["rollout/cut_off"] + sums["rollout/looped"]
    shares = {
        "are cut off or loop": (endless, sums["rollout/answers"]),
        "cannot be read": (sums["rollout/unreadable"], sums["rollout/answers"]),
        "of their objects are invalid": (sums["parse/invalid"], sums["parse/objects"]),
        "of their valid objects are duplicates": (sums["target/duplicates_removed"], sums["parse/valid"]),
    }
    return [f"{odd / total:.0%} {words}" for words, (odd, total) in shares.items() if odd > ODD_SHARE * total]


class FillWarning(Sink):
    """Warns when packed rows are filled less than `packing_min_fill_ratio`, on average over the rows of all ranks
    between two log lines. It warns once, and again only if rows were full enough in between."""

    def __init__(self, min_fill_ratio: float) -> None:
        self._min_fill_ratio = min_fill_ratio
        self._warned = False

    def log(self, state: Any, values: dict[str, float]) -> None:
        if "packing/fill" not in values:
            return
        fill, waiting = values["packing/fill"], values["packing/waiting"]
        underfull = fill < self._min_fill_ratio
        if underfull and not self._warned:
            advice = (
                "few segments wait for a row: start a new run with a larger "
                "training.per_device_train_batch_size or a smaller global_max_length"
                if waiting < 1
                else f"{waiting:.1f} segments are waiting because they did not fit: start a new run with a larger "
                "global_max_length, so that more of them share a row"
            )
            say(
                f"warning: step {state.global_step}: packed rows are filled to {fill:.3f} on average, and "
                f"training.packing_min_fill_ratio is {self._min_fill_ratio:g}; {advice}"
            )
        self._warned = underfull
