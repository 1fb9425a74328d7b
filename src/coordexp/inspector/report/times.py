"""Where the time of a step went, phase by phase. From the logs of a group to seconds a step over the run.

The phases are disjoint, as the run measures them: `compute` is without the pictures read and the waiting inside of
it. What a step takes beyond them is `rest`; what the run takes beyond its steps, evaluation and saving among it,
is `between`. Seconds are means over steps and processes.
"""

from dataclasses import dataclass

import numpy as np

from coordexp.inspector.report.curves import Stretches
from coordexp.inspector.report.groups import Group
from coordexp.inspector.report.series import NOTHING, Floats, Log, Series, Steps, steps_of_lines

PHASES = {
    "rollout": "the model, or the engine, answers",
    "sync": "the engine gets the weights, with the canary and making room",
    "correct": "answers are parsed, matched, and corrected",
    "pictures": "pictures are read",
    "compute": "forward and backward",
    "waited": "waiting for processes that took longer to make their rows",
    "rest": "what is left of a step: the update itself, clipping, bookkeeping",
}
BETWEEN = "between steps: evaluation, saving, starting the engine"
MOST = 64  # columns of the stacked chart


@dataclass(frozen=True, eq=False)
class Spent:
    """`seconds` [phases, columns] a step, in the mean at `steps` and between `edges`; `shares` of the time of the
    whole run, with `between`."""

    steps: Floats
    edges: Floats
    seconds: Floats
    shares: dict[str, float]
    step: float


def spent(group: Group, over: Stretches) -> Spent | None:
    """None when no step was timed, or none took time. Means over the runs of the group."""
    few = Stretches(over.first, over.last, min(over.count, MOST))
    tables = [found for one in group.runs if (found := _by_stretch(one.log, few)) is not None]
    if not tables:
        return None
    kept = np.unique(np.concatenate([where for where, _ in tables]))
    all_runs = np.full((len(tables), len(PHASES) + 1, len(kept)), np.nan)
    for k, (where, table) in enumerate(tables):
        all_runs[k][:, np.searchsorted(kept, where)] = table
    mean = np.nanmean(all_runs, axis=0)
    totals = [total for one in group.runs if (total := totals_of(one.log)) is not None]
    whole = {name: sum(total[name] for total in totals) for name in totals[0]}
    everything = sum(whole.values())
    if everything <= 0:
        return None
    steps = sum(int(one.log["loss"].steps[-1]) for one in group.runs if len(one.log.get("loss", NOTHING)))
    within = everything - whole["between"]
    shares = {name: value / everything for name, value in whole.items()}
    return Spent(mean[-1], _edges(mean[-1], few), mean[:-1], shares, within / max(1, steps))


def totals_of(log: Log) -> dict[str, float] | None:
    """Seconds of the whole run by phase, and between the steps."""
    table = _phases(log)
    if table is None:
        return None
    weights = steps_of_lines(log)
    seconds = dict(zip(PHASES, (table * weights).sum(axis=1).tolist(), strict=True))
    wall = log.get("seconds", NOTHING).last or 0.0
    return seconds | {"between": max(0.0, wall - sum(seconds.values()))}


def share_of_step(log: Log, phase: str) -> float | None:
    """Of the time inside of steps."""
    found = totals_of(log)
    within = sum(value for name, value in (found or {}).items() if name != "between")
    return found[phase] / within if found and within else None


def _edges(steps: Floats, over: Stretches) -> Floats:
    """Half-way between the steps of neighbouring columns, and the ends of the chart."""
    return np.concatenate([[over.first], (steps[1:] + steps[:-1]) / 2, [over.last]]).astype(float)


def _phases(log: Log) -> Floats | None:
    """[phases, lines]. A phase that a line does not name took no time."""
    steps, whole = log.get("loss", NOTHING).steps, log.get("time/step", NOTHING)
    if not len(steps) or not len(whole):
        return None
    rows = [_aligned(log.get(f"time/{name}", NOTHING), steps) for name in PHASES if name != "rest"]
    rest = np.maximum(_aligned(whole, steps) - np.sum(rows, axis=0), 0.0)
    return np.stack([*rows, rest])


def _aligned(series: Series, steps: Steps) -> Floats:
    found = np.zeros(len(steps))
    _, left, right = np.intersect1d(steps, series.steps, assume_unique=True, return_indices=True)
    found[left] = np.nan_to_num(series.values[right])
    return found


def _by_stretch(log: Log, over: Stretches) -> tuple[Steps, Floats] | None:
    """Which stretches, and [phases and the middle step, stretches], each line counting as the steps it is of. A
    line of step 0 is of none."""
    table = _phases(log)
    weights = steps_of_lines(log).astype(float)
    some = weights > 0
    if table is None or not some.any():
        return None
    steps, weights = log["loss"].steps[some], weights[some]
    where, first = np.unique(over.of(steps), return_index=True)
    rows = np.concatenate([table[:, some], steps[None].astype(float)])
    sums = np.add.reduceat(rows * weights, first, axis=1) / np.add.reduceat(weights, first)
    return where, sums
