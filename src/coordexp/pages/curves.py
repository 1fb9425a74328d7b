"""The numbers that a run logged, the curves of a chart, and the time of a run by phase.

A metrics file of any length is read line by line into one `Series` per metric: steps and values. A value that was
logged as null was not a number. It is kept, as nan. If a step was logged twice, the last value counts.

A `Curve` has a bounded number of points. A point is one step, or a range of neighbouring steps if there are more
steps than fit. Its value is the mean over the range in each run, then over the runs. Its inner band spans the
means of the runs, its outer band every logged value.

The phases of a step do not overlap, as the run measures them: `compute` excludes reading images and waiting. The
rest of a step's time is `rest`. The time that the run took besides its steps, such as evaluation and saving, is
`between`. Seconds are means over steps and processes.
"""

import math
import reprlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordexp.errors import DataError
from coordexp.files import read_json_lines

LARGEST_NUMBER = 1e100  # so that sums and products of the numbers on a page stay finite
NOT_WRITTEN_BY_A_RUN = "the file was edited, or another program wrote it; give another run"
MAX_POINTS = 60  # of a line; more would show the noise of single steps
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
    def last_step(self) -> int:
        """The last step that was logged; 0 if none was."""
        return int(self.steps[-1]) if len(self.steps) else 0

    @property
    def invalid_steps(self) -> Steps:
        """The steps at which something other than a number was logged."""
        steps: Steps = self.steps[~np.isfinite(self.values)]
        return steps

    def at(self, step: int) -> float:
        """Return the value at a step, nan if there is none."""
        values = self.values[self.steps == step]
        return float(values[0]) if len(values) else math.nan

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
            if value is None or (type(value) is float and not math.isfinite(value)):
                values.append(math.nan)
            elif type(value) in (int, float) and abs(value) <= LARGEST_NUMBER:
                values.append(value)
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
    `lowest` and `highest` all values. `broken` says in which points something other than a number was logged."""

    steps: Floats
    mean: Floats
    low: Floats
    high: Floats
    lowest: Floats
    highest: Floats
    broken: NDArray[np.bool_]

    @property
    def last(self) -> float:
        """The last point that is a number."""
        return float(self.mean[np.isfinite(self.mean)][-1])

    @property
    def is_zero(self) -> bool:
        """Whether every logged value is 0."""
        return not self.broken.any() and not self.lowest.any() and not self.highest.any()

    @classmethod
    def through(cls, steps: Floats, values: Floats) -> "Curve":
        """Return the curve of one run through these points, without bands."""
        return cls(steps, values, values, values, values, values, np.zeros(len(steps), bool))


def divide_steps(series: Sequence[Series]) -> StepRanges:
    """Return ranges over every step of these series."""
    steps = [metric.steps for metric in series if len(metric)]
    if not steps:
        return StepRanges(0, 0, 1)
    first, last = min(int(run[0]) for run in steps), max(int(run[-1]) for run in steps)
    return StepRanges(first, last, min(MAX_POINTS, last - first + 1))


def build_curve(runs: Sequence[Series], ranges: StepRanges) -> Curve | None:
    """Return None if no run has a number."""
    if not any(np.isfinite(series.values).any() for series in runs):
        return None
    parts: dict[int, list[Series]] = {}  # by the range, what each run logged in it
    for series in runs:
        numbers, starts = np.unique(ranges.index(series.steps), return_index=True)
        for number, start, end in zip(numbers, starts, [*starts[1:], len(series)], strict=True):
            parts.setdefault(int(number), []).append(Series(series.steps[start:end], series.values[start:end]))
    points = np.array([_summarise(parts[number]) for number in sorted(parts)])
    steps, mean, low, high, lowest, highest, broken = points.T
    return Curve(steps, mean, low, high, lowest, highest, broken > 0)


def _summarise(parts: Sequence[Series]) -> tuple[float, ...]:
    """Return a point of a curve from what each run logged in its range: the values of the fields of `Curve`."""
    step = float(np.mean([part.steps.mean() for part in parts]))
    known = [part.values[np.isfinite(part.values)] for part in parts]
    is_broken = any(len(values) < len(part) for values, part in zip(known, parts, strict=True))
    known = [values for values in known if len(values)]
    if not known:
        return (step, *[math.nan] * 5, is_broken)
    means, values = [float(values.mean()) for values in known], np.concatenate(known)
    return (step, sum(means) / len(means), min(means), max(means), values.min(), values.max(), is_broken)


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


def _align(series: Series, steps: Steps) -> Floats:
    """Return the values at these steps, 0 where there is none."""
    values = np.zeros(len(steps))
    _, left, right = np.intersect1d(steps, series.steps, assume_unique=True, return_indices=True)
    values[left] = np.nan_to_num(series.values[right])
    return values
