"""The charts of a report, in families, in the order of the page.

A chart is one number over steps with a line for every group, so that a colour means the same group everywhere.
Metric names are those of `metrics.jsonl`. Counts of objects are divided by the number of answers, because a log
line sums over all the answers it covers.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coordexp.pages.charts import format_number
from coordexp.pages.curves import Series, divide, subtract
from coordexp.pages.run_folder import LoggedRun, RunGroup


@dataclass(frozen=True)
class Chart:
    """A logged number over steps, divided by the number `per`, or multiplied by the weight of the loss term
    `weight_of`. `note` explains the number, and a `share` is between 0 and 1."""

    name: str
    title: str
    note: str = ""
    share: bool = False
    per: str = ""
    weight_of: str = ""
    wide: bool = False

    def read(self, run: LoggedRun) -> Series:
        series = run.series(self.name)
        if self.per:
            return divide(series, run.series(self.per))
        return series.scale(term_weight(run, self.weight_of) or 0.0) if self.weight_of else series


@dataclass(frozen=True)
class LearnableLoss(Chart):
    """The loss without the entropy of its soft targets, for runs that logged it."""

    def read(self, run: LoggedRun) -> Series:
        return subtract(run.series("loss"), entropy_of_targets(run))


@dataclass(frozen=True)
class Family:
    """`absent` says why a run may have none of these charts. The reader has to open a `folded` family."""

    key: str
    title: str
    note: str
    absent: str
    charts: tuple[Chart, ...]
    folded: bool = False


LOSS = "Each term is multiplied by its weight, so the terms add up to the loss. Every chart has its own scale."
SOFT_CE, SOFT_KL = "coord_reg/soft_ce", "coord_reg/soft_kl"
ENTROPY = (
    f" A model that gives exactly the soft target of {SOFT_CE} still has its entropy as a loss. {SOFT_KL} is "
    f"{SOFT_CE} without that entropy, and the loss that can be learned is the loss without it."
)
EVALUATION = "Greedy answers to the held-out images, at IoU 0.5 unless stated otherwise."
NO_EVALUATION = (
    'no evaluation was logged: custom.val_jsonl is not set, training.eval_strategy is "no", or the first '
    "evaluation is still to come"
)
QUESTIONS = "Share of held-out questions whose greedy answer is right, by data set (custom.eval_data)."
NO_QUESTIONS = "no questions were asked: custom.eval_data is not set, or the first evaluation is still to come"
SETS = (
    "The loss of a data set is that of its own samples, each term divided by their positions only, so the losses "
    "of sets do not add up to the loss. Samples and tokens are those of a log line, over all processes."
)
NO_SETS = "the run has a single data set (custom.train_data mixes several)"
ANSWERS = "Training rollouts before correction, without regard to class. Steps on the ground truth have none."
ENDS = "Shares of answers, and of the objects in them."
NO_ROLLOUTS = "no step had rollouts: all steps so far were on the ground truth"
DIAGNOSTICS = "Means over supervised positions. They do not enter the loss."
NO_DIAGNOSTICS = "no coord_diag is declared in the pipeline's diagnostics"
MEANS = "The same sums, divided by the number of supervised positions and without weights."
NOTHING_LOGGED = "no step was logged: the run has just begun, or training.logging_steps is larger than its steps"


def list_families(groups: Sequence[RunGroup]) -> tuple[Family, ...]:
    runs = [run for group in groups for run in group.runs]
    names = dict.fromkeys(name for run in runs for name in run.log)
    ends = _end_charts(names, runs)
    loss_note = LOSS + (ENTROPY if SOFT_KL in names else "")
    families = (
        Family("loss", "Loss", loss_note, NOTHING_LOGGED, (*_loss_charts(groups), *_term_charts(groups))),
        Family("eval", "Evaluation on held-out images", EVALUATION, NO_EVALUATION, EVALUATION_CHARTS),
        Family("chat", "Questions", QUESTIONS, NO_QUESTIONS, _chat_charts(names)),
        Family("sets", "Data sets of the mixture", SETS, NO_SETS, _set_charts(names)),
        Family("recall", "Training answers: recall", ANSWERS, NO_ROLLOUTS, RECALL),
        Family("precision", "Training answers: precision", ANSWERS, NO_ROLLOUTS, PRECISION),
        Family("ends", "Training answers: how they ended", ENDS, NO_ROLLOUTS, ends),
        Family("lengths", "Lengths in tokens", "", "no steps were logged", LENGTHS),
        Family("packing", "Packing", "Means over packed rows.", "training.packing is off", PACKING),
        Family("optimizer", "Optimizer", "", "no steps were logged", OPTIMIZER),
        Family("diag", "Coordinate distributions", DIAGNOSTICS, NO_DIAGNOSTICS, _diagnostic_charts(names)),
        Family(
            "means",
            "Loss terms, means over supervised positions",
            MEANS,
            "no terms were logged",
            tuple(Chart(name, name.removesuffix("/mean")) for name in names if name.endswith("/mean")),
            folded=True,
        ),
    )
    if "loss" in names:
        return families
    return tuple(replace(family, absent=NOTHING_LOGGED) for family in families)


def term_weight(run: LoggedRun, term: str) -> float | None:
    """Return the weight of a loss term in `run.json`; None if it is not named there or is a diagnostic."""
    objective = run.run.latest_start.objective
    return next((row.weight for row in objective.terms if row.term == term), None) if objective else None


def entropy_of_targets(run: LoggedRun) -> Series:
    """Return how much of the loss is the entropy of soft targets, at the steps that logged it."""
    entropy = subtract(run.series(SOFT_CE), run.series(SOFT_KL))
    return entropy.scale(term_weight(run, SOFT_CE) or 0.0)


_ANSWERS = "rollout/answers"
RECALL = (
    Chart("match/recall", "recall", "true objects that were matched", share=True),
    Chart("match/missed", "missed per answer", "true objects that were appended", per=_ANSWERS),
    Chart("rollout/under_count_rate", "under-counts", "answers with fewer valid objects than labels", share=True),
)
PRECISION = (
    Chart("match/precision", "precision", "valid objects that were matched", share=True),
    Chart("match/extra", "extra per answer", "false positives: valid, but not matched", per=_ANSWERS),
    Chart("parse/repeats", "repeats per answer", "valid objects that were written before", per=_ANSWERS),
    Chart("rollout/over_count_rate", "over-counts", "answers with more valid objects than labels", share=True),
)
LENGTHS = (
    Chart("rollout/mean_tokens", "of an answer", "without the stop token"),
    Chart("target/mean_prefix_tokens", "kept of an answer", "the prefix"),
    Chart("target/mean_appended_tokens", "appended to an answer", "missed objects and the end of turn"),
    Chart("tokens", "trained on", "per log line, in the first process"),
)
PACKING = (
    Chart("packing/fill", "fill", "share of a row that is used", share=True),
    Chart("packing/segments", "segments per row"),
    Chart("packing/waiting", "waiting segments", "in the carry buffer"),
    Chart("packing/oldest_waited", "longest wait", "draws that the oldest segment has waited"),
    Chart("packing/underfull", "underfull rows", share=True),
)
OPTIMIZER = (
    Chart("learning_rate", "learning rate"),
    Chart("grad_norm", "gradient norm", "before clipping"),
    Chart("time/step", "seconds per step", "from the first rollout to the update"),
)
EVALUATED = {
    "f1_50": ("F1", ""),
    "recall_50": ("recall", ""),
    "precision_50": ("precision", ""),
    "ap": ("AP", "boxes, COCO's mean over IoU 0.50:0.95"),
    "mask_ap": ("mask AP", "COCO's mean over IoU 0.50:0.95"),
    "f1_50_any_class": ("F1, any class", ""),
    "recall_50_any_class": ("recall, any class", ""),
    "precision_50_any_class": ("precision, any class", ""),
    "mean_iou": ("mean IoU of pairs", ""),
    "duplicates": ("duplicates", "of valid objects"),
    "invalid": ("invalid", "of all objects"),
    "truncated": ("truncated", "of answers"),
    "skipped": ("skipped", "of true objects: missed, before the last object of the answer"),
    "stopped": ("stopped", "of true objects: missed, behind the last object of the answer"),
    "over_count": ("over-counts", "of answers"),
    "oversized": ("oversized", "of valid objects"),
    "unknown_class": ("unknown class", "of valid objects"),
    "unreadable": ("unreadable", "of answers"),
    "boxes_on_empty": ("boxes on empty images", "of images without an object"),
    "absent_classes": ("absent classes answered", "of asked classes that are not in the image"),
    "unasked": ("unasked objects", "of valid objects in answers to a list of classes"),
}
EVALUATION_CHARTS = tuple(Chart(f"eval_{name}", *words, share=True) for name, words in EVALUATED.items())


def _loss_charts(groups: Sequence[RunGroup]) -> tuple[Chart, ...]:
    """Return the chart of the loss, and that of the part that can be learned if there is another part."""
    last = {
        group.letter: value for group in groups if (value := entropy_of_targets(group.runs[0]).last) is not None
    }
    note = "the weighted sum of the terms"
    if not last:
        return (Chart("loss", "loss", note, wide=True),)
    shown = ", ".join(f"{letter} {format_number(value)}" for letter, value in last.items())
    note += f"; in the last line with soft targets, {shown} of it is their entropy"
    learnable = LearnableLoss(
        "learnable", "loss that can be learned", "the loss without the entropy of soft targets"
    )
    return Chart("loss", "loss", note, wide=True), learnable


def _term_charts(groups: Sequence[RunGroup]) -> tuple[Chart, ...]:
    runs = [run for group in groups for run in group.runs]
    names = dict.fromkeys(
        name for run in runs for name in run.log if "/" in name and term_weight(run, name) is not None
    )
    charts = {name: Chart(name, name, _describe_weights(name, groups), weight_of=name) for name in names}
    if SOFT_CE in charts and any(SOFT_KL in run.log for run in runs):
        note = f"{SOFT_CE} without the entropy of its target, {charts[SOFT_CE].note}"
        charts[SOFT_CE] = replace(
            charts[SOFT_CE], note=f"{charts[SOFT_CE].note}; includes the entropy of its target"
        )
        charts[SOFT_KL] = Chart(SOFT_KL, SOFT_KL, note, weight_of=SOFT_CE)
    return tuple(charts.values())


def _describe_weights(name: str, groups: Sequence[RunGroup]) -> str:
    weights = [term_weight(group.runs[0], name) for group in groups]
    if len(set(weights)) == 1:
        return f"weight {weights[0]:g}"
    words = [
        f"{group.letter} {'none' if weight is None else f'{weight:g}'}"
        for group, weight in zip(groups, weights, strict=True)
    ]
    return f"weight {', '.join(words)}"


def _end_charts(names: Collection[str], runs: Sequence[LoggedRun]) -> tuple[Chart, ...]:
    """Return the charts of how answers ended. Reasons for invalid objects have one only if they occurred."""
    reasons = [
        name
        for name in names
        if name.startswith("parse/invalid/") and any(np.nansum(run.series(name).values) > 0 for run in runs)
    ]
    return (
        Chart("rollout/cut_off_rate", "cut off", "at max_new_tokens", share=True),
        Chart("rollout/looped", "looped", "ended by the repeat guard", share=True, per=_ANSWERS),
        Chart("rollout/unreadable", "unreadable", "do not begin with {", share=True, per=_ANSWERS),
        Chart("parse/invalid_rate", "invalid objects", "of all objects", share=True),
        *(
            Chart(name, f"invalid: {name.rsplit('/', 1)[1]}", "of all objects", share=True, per="parse/objects")
            for name in reasons
        ),
    )


def _chat_charts(names: Collection[str]) -> tuple[Chart, ...]:
    prefix = "eval_accuracy_"
    return tuple(
        Chart(name, name.removeprefix(prefix), "accuracy", share=True) for name in names if name.startswith(prefix)
    )


def _set_charts(names: Collection[str]) -> tuple[Chart, ...]:
    """Return the charts of each data set: `set/NAME/loss` and so on, set by set."""
    return tuple(Chart(name, " ".join(name.split("/")[1:])) for name in sorted(names) if name.startswith("set/"))


def _diagnostic_charts(names: Collection[str]) -> tuple[Chart, ...]:
    charts = [
        Chart(name, name.removeprefix("coord_diag/").replace("_", " "), share="entropy" not in name)
        for name in names
        if name.startswith("coord_diag/")
    ]
    return (*charts, Chart("broken_logits", "broken logits", "NaN or infinite, per position; should be 0"))
