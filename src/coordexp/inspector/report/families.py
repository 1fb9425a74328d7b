"""Which charts there are: their families, in the order of the page, and what each shows of a run's log.

A chart is one number over steps, with a line for every group, so that a colour means a group everywhere. Names
are those of `metrics.jsonl`; counts of objects are divided by answers, since a log line sums over what it covers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coordexp.inspector.report.groups import Group, Logged
from coordexp.inspector.report.series import NOTHING, Log, Series, ratio

Read = Callable[[Logged], Series]


@dataclass(frozen=True)
class Chart:
    """`key` is unique on the page. `unit` is what the numbers are; a `share` is between 0 and 1."""

    key: str
    title: str
    read: Read
    about: str = ""
    share: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Family:
    """`absent` says why a run may have none of it; `folded` families are opened by the reader."""

    key: str
    title: str
    about: str
    absent: str
    charts: tuple[Chart, ...]
    folded: bool = False


def families(groups: Sequence[Group]) -> tuple[Family, ...]:
    logs = [logged.log for group in groups for logged in group.runs]
    names = dict.fromkeys(name for log in logs for name in log)
    found = _declared(groups, names, logs)
    if "loss" in names:
        return found
    return tuple(replace(family, absent=NOTHING_LOGGED) for family in found)


NOTHING_LOGGED = "no step was logged: the run has just begun, or training.logging_steps is above its steps"


def _declared(groups: Sequence[Group], names: dict[str, None], logs: Sequence[Log]) -> tuple[Family, ...]:
    return (
        Family("loss", "Loss", LOSS, NOTHING_LOGGED, (_loss(), *_terms(groups))),
        Family("eval", "Evaluation on held-out images", EVALUATION, NO_EVALUATION, tuple(_evaluation(names))),
        Family("recall", "Training answers: recall", ANSWERS, NO_ROLLOUTS, RECALL),
        Family("precision", "Training answers: precision", ANSWERS, NO_ROLLOUTS, PRECISION),
        Family("ends", "Training answers: how they ended", ENDS, NO_ROLLOUTS, _ends(names, logs)),
        Family("lengths", "Lengths in tokens", "", "no steps were logged", LENGTHS),
        Family("packing", "Packing", "Means over packed rows.", "training.packing is off", PACKING),
        Family("optimizer", "Optimizer", "", "no steps were logged", OPTIMIZER),
        Family("diag", "Coordinate distributions", DIAGNOSTICS, NO_DIAGNOSTICS, tuple(_diagnostics(names))),
        Family(
            "means",
            "Loss terms, means over supervised positions",
            MEANS,
            "no terms were logged",
            tuple(_means(names)),
            True,
        ),
    )


LOSS = "Each term times its weight, as it enters the loss: the terms add up to it. Every chart has its own scale."
EVALUATION = "Greedy answers to the held-out images, at IoU 0.5 unless named otherwise."
NO_EVALUATION = (
    'no evaluation was logged: custom.val_jsonl is not set, training.eval_strategy is "no", or the first '
    "evaluation is still to come"
)
ANSWERS = "Of training rollouts, before they are corrected, without class. Steps on the ground truth have none."
ENDS = "Shares of answers, and of the objects in them."
NO_ROLLOUTS = "no step had rollouts: all so far were on the ground truth"
DIAGNOSTICS = "Means over supervised positions; they enter no loss."
NO_DIAGNOSTICS = "no coord_diag is declared in the pipeline's diagnostics"
MEANS = "The same sums divided by the positions that were supervised, without weight."


def logged(name: str) -> Read:
    return lambda run: run.log.get(name, NOTHING)


def an_answer(name: str) -> Read:
    return lambda run: ratio(run.log.get(name, NOTHING), run.log.get("rollout/answers", NOTHING))


def weight_of(run: Logged, term: str) -> float | None:
    """As `run.json` has it; None of a term that it does not name."""
    objective = run.latest.get("objective") or {}
    return next((one["weight"] for one in objective.get("terms", ()) if one["term"] == term), None)


RECALL = (
    Chart("match/recall", "recall", logged("match/recall"), "true objects that were matched", share=True),
    Chart("missed", "missed per answer", an_answer("match/missed"), "true objects that were appended"),
    Chart(
        "rollout/early_stop_rate",
        "early stops",
        logged("rollout/early_stop_rate"),
        "stopped with fewer valid objects than true",
        share=True,
    ),
)
PRECISION = (
    Chart(
        "match/precision", "precision", logged("match/precision"), "valid objects that were matched", share=True
    ),
    Chart("extra", "extra per answer", an_answer("match/extra"), "valid objects without a partner"),
    Chart("repeats", "repeats per answer", an_answer("parse/repeats"), "valid objects said before, word by word"),
    Chart(
        "rollout/over_count_rate",
        "over-counts",
        logged("rollout/over_count_rate"),
        "more valid objects than true",
        share=True,
    ),
)
LENGTHS = (
    Chart("rollout/mean_tokens", "of an answer", logged("rollout/mean_tokens"), "without the stop token"),
    Chart("target/mean_prefix_tokens", "kept of an answer", logged("target/mean_prefix_tokens"), "the prefix"),
    Chart(
        "target/mean_appended_tokens",
        "appended to an answer",
        logged("target/mean_appended_tokens"),
        "missed objects, and the end of turn",
    ),
    Chart("tokens", "trained on", logged("tokens"), "a log line, by the first process"),
)
PACKING = (
    Chart("packing/fill", "fill", logged("packing/fill"), "share of a row that is used", share=True),
    Chart("packing/segments", "segments a row", logged("packing/segments")),
    Chart("packing/waiting", "segments that wait", logged("packing/waiting"), "in the carry buffer"),
    Chart(
        "packing/oldest_waited", "longest wait", logged("packing/oldest_waited"), "draws, of the oldest segment"
    ),
    Chart("packing/underfull", "underfull rows", logged("packing/underfull"), share=True),
)
OPTIMIZER = (
    Chart("learning_rate", "learning rate", logged("learning_rate")),
    Chart("grad_norm", "gradient norm", logged("grad_norm"), "before clipping"),
    Chart("time/step", "seconds a step", logged("time/step"), "from the first rollout to the update"),
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
    "early_stop": ("early stops", "of answers that stopped by themselves"),
    "over_count": ("over-counts", "of answers"),
    "oversized": ("oversized", "of valid objects"),
    "unknown_class": ("unknown class", "of valid objects"),
    "unreadable": ("unreadable", "of answers"),
    "boxes_on_empty": ("boxes on empty images", "of images without an object"),
}


def _loss() -> Chart:
    return Chart("loss", "loss", logged("loss"), "the weighted sum of the terms", wide=True)


def _terms(groups: Sequence[Group]) -> tuple[Chart, ...]:
    runs = [run for group in groups for run in group.runs]
    names = dict.fromkeys(
        name for run in runs for name in run.log if "/" in name and weight_of(run, name) is not None
    )
    return tuple(Chart(name, name, _weighted(name), _weights(name, groups)) for name in names)


def _weighted(name: str) -> Read:
    return lambda run: run.log.get(name, NOTHING).times(weight_of(run, name) or 0.0)


def _weights(name: str, groups: Sequence[Group]) -> str:
    found = [weight_of(group.runs[0], name) for group in groups]
    if len(set(found)) == 1:
        return f"weight {found[0]:g}"
    each = (f"{g.letter} {'none' if w is None else f'{w:g}'}" for g, w in zip(groups, found, strict=True))
    return f"weight {', '.join(each)}"


def _evaluation(names: Sequence[str] | dict[str, None]) -> list[Chart]:
    return [
        Chart(f"eval_{name}", title, logged(f"eval_{name}"), about, share=True)
        for name, (title, about) in EVALUATED.items()
        if f"eval_{name}" in names
    ]


def _ends(names: dict[str, None], logs: Sequence[Log]) -> tuple[Chart, ...]:
    """Of the reasons for invalid objects, those that ever came."""
    reasons = [
        name for name in names if name.startswith("parse/invalid/") and any(_ever(log.get(name)) for log in logs)
    ]
    fixed = (
        Chart("rollout/cut_off_rate", "cut off", logged("rollout/cut_off_rate"), "at max_new_tokens", share=True),
        Chart("looped", "looped", an_answer("rollout/looped"), "ended by the repeat guard", share=True),
        Chart("unreadable", "unreadable", an_answer("rollout/unreadable"), "do not begin with {", share=True),
        Chart("parse/invalid_rate", "invalid objects", logged("parse/invalid_rate"), "of all objects", share=True),
    )
    return fixed + tuple(
        Chart(name, f"invalid: {name.rsplit('/', 1)[1]}", _an_object(name), "of all objects", share=True)
        for name in reasons
    )


def _ever(series: Series | None) -> bool:
    return series is not None and bool(np.nansum(series.values) > 0)


def _an_object(name: str) -> Read:
    return lambda run: ratio(run.log.get(name, NOTHING), run.log.get("parse/objects", NOTHING))


def _diagnostics(names: dict[str, None]) -> list[Chart]:
    found = [name for name in names if name.startswith("coord_diag/")]
    charts = [
        Chart(name, name.removeprefix("coord_diag/").replace("_", " "), logged(name), share="entropy" not in name)
        for name in found
    ]
    if "broken_logits" in names:
        charts.append(
            Chart("broken_logits", "broken logits", logged("broken_logits"), "no numbers, a position; should be 0")
        )
    return charts


def _means(names: dict[str, None]) -> list[Chart]:
    return [Chart(name, name.removesuffix("/mean"), logged(name)) for name in names if name.endswith("/mean")]
