"""The time of a step by phase: from the logs of a group to seconds per step over the run.

The phases do not overlap, as the run measures them: `compute` excludes reading images and waiting. The rest of a
step's time is `rest`. The time that the run took besides its steps, such as evaluation and saving, is `between`.
Seconds are means over steps and processes.
"""

from dataclasses import dataclass

import numpy as np

from coordexp.inspector.report.groups import RunGroup
from coordexp.inspector.report.series import EMPTY, Floats, Log, Series, StepRanges, Steps, steps_per_line

PHASES = {
    "rollout": "the model or the engine answers",
    "sync": "the engine receives the weights, including the canary and freeing memory",
    "correct": "answers are parsed, matched and corrected",
    "pictures": "images are read",
    "compute": "forward and backward pass",
    "waited": "waiting for processes that took longer to build their rows",
    "rest": "the rest of a step: the update itself, clipping, bookkeeping",
}
BETWEEN = "between steps: evaluation, saving, starting the engine"
MAX_COLUMNS = 64  # of the stacked chart


@dataclass(frozen=True, eq=False)
class PhaseTimes:
    """`seconds` is [phases, columns], per step. Each column has its mean step in `steps` and lies between two of
    the `edges`. `shares` are shares of the whole run's time and include `between`. `step` is the mean duration of
    a step."""

    steps: Floats
    edges: Floats
    seconds: Floats
    shares: dict[str, float]
    step: float


def measure_phases(group: RunGroup, ranges: StepRanges) -> PhaseTimes | None:
    """Return means over the runs of the group, or None if no step was timed or none took any time."""
    columns = StepRanges(ranges.first, ranges.last, min(ranges.count, MAX_COLUMNS))
    tables = [table for run in group.runs if (table := _mean_by_range(run.log, columns)) is not None]
    if not tables:
        return None
    used = np.unique(np.concatenate([index for index, _ in tables]))
    by_run = np.full((len(tables), len(PHASES) + 1, len(used)), np.nan)
    for k, (index, seconds) in enumerate(tables):
        by_run[k][:, np.searchsorted(used, index)] = seconds
    mean = np.nanmean(by_run, axis=0)
    totals = [total for run in group.runs if (total := total_by_phase(run.log)) is not None]
    whole = {name: sum(total[name] for total in totals) for name in totals[0]}
    everything = sum(whole.values())
    if everything <= 0:
        return None
    steps = sum(int(run.series("loss").steps[-1]) for run in group.runs if len(run.series("loss")))
    within = everything - whole["between"]
    shares = {name: value / everything for name, value in whole.items()}
    return PhaseTimes(mean[-1], _edges(mean[-1], columns), mean[:-1], shares, within / max(1, steps))


def total_by_phase(log: Log) -> dict[str, float] | None:
    """Return the seconds of the whole run by phase and `between` steps, or None if no step was timed."""
    table = _seconds_by_line(log)
    if table is None:
        return None
    weights = steps_per_line(log)
    seconds = dict(zip(PHASES, (table * weights).sum(axis=1).tolist(), strict=True))
    wall = log.get("seconds", EMPTY).last or 0.0
    return seconds | {"between": max(0.0, wall - sum(seconds.values()))}


def share_of_step(log: Log, phase: str) -> float | None:
    """Return the share of a phase in the time inside steps, or None if no step was timed."""
    totals = total_by_phase(log)
    within = sum(value for name, value in (totals or {}).items() if name != "between")
    return totals[phase] / within if totals and within else None


def _edges(steps: Floats, ranges: StepRanges) -> Floats:
    """Return the ends of the chart and the points half-way between neighbouring columns."""
    return np.concatenate([[ranges.first], (steps[1:] + steps[:-1]) / 2, [ranges.last]]).astype(float)


def _seconds_by_line(log: Log) -> Floats | None:
    """Return [phases, lines]. A phase that is absent from a line took no time."""
    steps, whole = log.get("loss", EMPTY).steps, log.get("time/step", EMPTY)
    if not len(steps) or not len(whole):
        return None
    rows = [_align(log.get(f"time/{name}", EMPTY), steps) for name in PHASES if name != "rest"]
    rest = np.maximum(_align(whole, steps) - np.sum(rows, axis=0), 0.0)
    return np.stack([*rows, rest])


def _align(series: Series, steps: Steps) -> Floats:
    """Return the values at these steps, 0 where there is none."""
    values = np.zeros(len(steps))
    _, left, right = np.intersect1d(steps, series.steps, assume_unique=True, return_indices=True)
    values[left] = np.nan_to_num(series.values[right])
    return values


def _mean_by_range(log: Log, ranges: StepRanges) -> tuple[Steps, Floats] | None:
    """Return the indices of the ranges that have values, and [phases and the middle step, ranges]. A line is
    weighted by the number of steps it covers, so a line of step 0 does not count."""
    table = _seconds_by_line(log)
    weights = steps_per_line(log).astype(float)
    counted = weights > 0
    if table is None or not counted.any():
        return None
    steps, weights = log["loss"].steps[counted], weights[counted]
    index, first = np.unique(ranges.index(steps), return_index=True)
    rows = np.concatenate([table[:, counted], steps[None].astype(float)])
    means = np.add.reduceat(rows * weights, first, axis=1) / np.add.reduceat(weights, first)
    return index, means
