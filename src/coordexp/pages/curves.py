"""The numbers that a run logged, the curves of a chart, and the time of a run by phase.

A metrics file of any length is read line by line into one `Series` per metric: steps and values. A value that was
logged as null was not a number. It is kept, as nan. If a step was logged twice, the last value counts.

A `Curve` has a bounded number of points. A point is one step, or a range of neighbouring steps if there are more
steps than fit. Its value is the mean over the range in each run, then over the runs. Its inner band spans the
runs, its outer band every logged value.

The phases of a step do not overlap, as the run measures them: `compute` excludes reading images and waiting. The
rest of a step's time is `rest`. The time that the run took besides its steps, such as evaluation and saving, is
`between`. Seconds are means over steps and processes.
"""

import math
import reprlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordexp.errors import DataError
from coordexp.files import read_json_lines

LARGEST_NUMBER = 1e100  # so that sums and products of the numbers on a page stay finite
NOT_WRITTEN_BY_A_RUN = "the file was edited, or another program wrote it; give another run"
MAX_POINTS = 200  # of a line; a chart is not wide enough to show more
MIN_POINTS = 60  # however many groups share the page
MAX_POINTS_OF_CHART = 480  # of all lines together
SMOOTH_FROM = 40  # points; below, a running mean hides more than it shows
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

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Series:
    """`steps` are increasing. `values` has nan where something other than a number was logged."""

    steps: Steps
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float | None:
        """The last value that is a number."""
        known = self.values[np.isfinite(self.values)]
        return float(known[-1]) if len(known) else None

    @property
    def invalid_steps(self) -> Steps:
        """The steps at which something other than a number was logged."""
        steps: Steps = self.steps[~np.isfinite(self.values)]
        return steps

    def scale(self, factor: float) -> "Series":
        return Series(self.steps, self.values * factor)


Log = Mapping[str, Series]  # by the name of the metric
EMPTY = Series(np.zeros(0, np.int64), np.zeros(0))


def read_log(path: Path) -> dict[str, Series]:
    """Return every metric of `metrics.jsonl`, in the order in which they first appear."""
    return collect_series(read_json_lines(path), str(path))


def collect_series(lines: Iterable[Mapping[str, Any]], where: str) -> dict[str, Series]:
    columns: dict[str, tuple[array[int], array[float]]] = {}
    for number, line in enumerate(lines, start=1):
        step = line.get("step")
        if type(step) is not int or not 0 <= step < 2**53:
            raise DataError(f"{where}, line {number}: step {reprlib.repr(step)} is not a whole number")
        for name, value in line.items():
            if name == "step":
                continue
            if name not in columns:
                columns[name] = array("q"), array("d")
            steps, values = columns[name]
            steps.append(step)
            if (type(value) is float or type(value) is int) and -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
                values.append(value)
            elif value is None or (type(value) is float and not math.isfinite(value)):
                values.append(math.nan)
            else:
                raise DataError(
                    f"{where}, line {number}: {name} {reprlib.repr(value)} is not a number up to "
                    f"{LARGEST_NUMBER:g}",
                    NOT_WRITTEN_BY_A_RUN,
                )
    return {name: _sort(*pair) for name, pair in columns.items()}


def _sort(steps: "array[int]", values: "array[float]") -> Series:
    """Sort by step and keep the last value of each step."""
    backwards = np.frombuffer(steps, np.int64)[::-1]
    unique, first = np.unique(backwards, return_index=True)
    return Series(unique, np.frombuffer(values, np.float64)[::-1][first])


def divide(numerator: Series, denominator: Series) -> Series:
    """Divide step by step, at the steps that both have and where the denominator is not zero."""
    steps, left, right = np.intersect1d(
        numerator.steps, denominator.steps, assume_unique=True, return_indices=True
    )
    nonzero = denominator.values[right] != 0
    return Series(steps[nonzero], numerator.values[left][nonzero] / denominator.values[right][nonzero])


@dataclass(frozen=True)
class StepRanges:
    """The steps `first` to `last`, divided into `count` ranges of equal length. All charts of a page share it."""

    first: int
    last: int
    count: int

    def index(self, steps: Steps) -> Steps:
        """Return the number of the range that each step is in."""
        return (steps - self.first) * self.count // (self.last - self.first + 1)

    @property
    def length(self) -> float:
        return (self.last - self.first + 1) / self.count


@dataclass(frozen=True, eq=False)
class Curve:
    """Points by increasing step, with nan where no run has a number. `low` and `high` span the means of the runs,
    `lowest` and `highest` all values. `runs` counts the runs that have the point. `broken` are the indices of
    points in which something other than a number was logged."""

    steps: Floats
    mean: Floats
    low: Floats
    high: Floats
    lowest: Floats
    highest: Floats
    runs: Steps
    broken: Steps

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        """The last point that is a number."""
        return float(self.mean[np.isfinite(self.mean)][-1])

    @property
    def is_zero(self) -> bool:
        """Whether every logged value is 0."""
        return not len(self.broken) and not self.lowest.any() and not self.highest.any()

    @classmethod
    def through(cls, steps: Floats, values: Floats) -> "Curve":
        """Return the curve of one run through these points, without bands."""
        none = np.zeros(0, np.int64)
        return cls(steps, values, values, values, values, values, np.ones(len(steps), np.int64), none)


def divide_steps(series: Sequence[Series], groups: int) -> StepRanges:
    """Return ranges over every step of these series, fewer if more groups share a chart."""
    steps = [metric.steps for metric in series if len(metric)]
    if not steps:
        return StepRanges(0, 0, 1)
    first, last = min(int(run[0]) for run in steps), max(int(run[-1]) for run in steps)
    most = max(MIN_POINTS, min(MAX_POINTS, MAX_POINTS_OF_CHART // max(1, groups)))
    return StepRanges(first, last, min(most, last - first + 1))


def build_curve(runs: Sequence[Series], ranges: StepRanges) -> Curve | None:
    """Return None if no run has a number."""
    summaries = [_summarise(series, ranges) for series in runs if len(series)]
    if not summaries or not any(np.isfinite(series.values).any() for series in runs):
        return None
    used = np.unique(np.concatenate([index for index, _ in summaries]))
    table = np.full((5, len(summaries), len(used)), np.nan)
    for k, (index, rows) in enumerate(summaries):
        table[:, k, np.searchsorted(used, index)] = rows
    steps, mean, lowest, highest, finite = table
    return Curve(
        steps=_over_runs(np.nanmean, steps),
        mean=_over_runs(np.nanmean, mean),
        low=_over_runs(np.nanmin, mean),
        high=_over_runs(np.nanmax, mean),
        lowest=_over_runs(np.nanmin, lowest),
        highest=_over_runs(np.nanmax, highest),
        runs=np.isfinite(mean).sum(axis=0),
        broken=np.flatnonzero(np.nan_to_num(finite, nan=1.0).min(axis=0) < 1),
    )


def smooth(values: Floats) -> Floats:
    """Return a running mean over neighbouring points. It has fewer at the ends; gaps stay gaps."""
    width = 2 * (len(values) // 50) + 1
    known = np.isfinite(values)
    window = np.ones(width)
    half = width // 2
    total = np.convolve(np.where(known, values, 0.0), window)[half : half + len(values)]
    count = np.convolve(known.astype(float), window)[half : half + len(values)]
    return np.where(known, total / np.maximum(count, 1.0), np.nan)


def _summarise(series: Series, ranges: StepRanges) -> tuple[Steps, Floats]:
    """Return which ranges have a value, and [5, ranges]: the middle step, the mean, the lowest and the highest
    value, and the share of values that are numbers."""
    index, first = np.unique(ranges.index(series.steps), return_index=True)
    known = np.isfinite(series.values)
    lines = np.diff(first, append=len(series)).astype(float)
    count = np.add.reduceat(known.astype(float), first)
    mean = np.add.reduceat(np.where(known, series.values, 0.0), first) / np.where(count > 0, count, np.nan)
    lowest = np.minimum.reduceat(np.where(known, series.values, np.inf), first)
    highest = np.maximum.reduceat(np.where(known, series.values, -np.inf), first)
    steps = np.add.reduceat(series.steps.astype(float), first) / lines
    statistics = [np.where(count > 0, row, np.nan) for row in (mean, lowest, highest)]
    return index, np.stack([steps, *statistics, count / lines])


def _over_runs(reduce: Callable[..., Floats], values: Floats) -> Floats:
    """Reduce over the runs; nan where no run has a number."""
    result = np.full(values.shape[1], np.nan)
    known = np.isfinite(values).any(axis=0)
    result[known] = reduce(values[:, known], axis=0)
    return result


def total_by_phase(log: Log) -> dict[str, float] | None:
    """Return the seconds of the whole run by phase and `between` steps, or None if no step was timed. A line
    counts as often as it covers steps, and a phase that is absent from a line took no time in it."""
    steps, whole = log.get("loss", EMPTY).steps, log.get("time/step", EMPTY)
    if not len(steps) or not len(whole):
        return None
    weights = np.diff(steps, prepend=0)
    rows = {name: _align(log.get(f"time/{name}", EMPTY), steps) for name in PHASES if name != "rest"}
    rows["rest"] = np.maximum(_align(whole, steps) - np.sum([*rows.values()], axis=0), 0.0)
    seconds = {name: float((row * weights).sum()) for name, row in rows.items()}
    wall = log.get("seconds", EMPTY).last or 0.0
    return seconds | {"between": max(0.0, wall - sum(seconds.values()))}


def share_of_step(log: Log, phase: str) -> float | None:
    """Return the share of a phase in the time inside steps, or None if no step was timed."""
    totals = total_by_phase(log)
    within = sum(value for name, value in (totals or {}).items() if name != "between")
    return totals[phase] / within if totals and within else None


def _align(series: Series, steps: Steps) -> Floats:
    """Return the values at these steps, 0 where there is none."""
    values = np.zeros(len(steps))
    _, left, right = np.intersect1d(steps, series.steps, assume_unique=True, return_indices=True)
    values[left] = np.nan_to_num(series.values[right])
    return values
