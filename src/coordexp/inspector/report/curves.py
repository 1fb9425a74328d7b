"""Lines and bands of a chart: from what the runs of a group logged to a bounded number of points.

A point is a step, or a stretch of neighbouring steps when there are more than fit. Its value is the mean over the
stretch in each run, then over the runs; its bands are the lowest to highest run and the lowest to highest value.
Nothing that was logged lies outside of the wider one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.inspector.report.series import Floats, Series, Steps

MOST_POINTS = 200  # of a line; wider than what a chart can show, a stretch of steps is one point
FEWEST_POINTS = 60  # however many groups share the page
ALL_POINTS = 480  # of all lines of a chart
SMOOTH_FROM = 40  # points; below, a running mean hides more than it shows


@dataclass(frozen=True)
class Stretches:
    """The steps `first` to `last` in `count` stretches of equal length. One for the whole page."""

    first: int
    last: int
    count: int

    def of(self, steps: Steps) -> Steps:
        return (steps - self.first) * self.count // (self.last - self.first + 1)

    @property
    def length(self) -> float:
        return (self.last - self.first + 1) / self.count


@dataclass(frozen=True, eq=False)
class Curve:
    """Points by rising step. `low` and `high` over runs, `lowest` and `highest` over all values; nan in a point
    without any number. `runs` is how many runs have the point."""

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


def stretches(logged: Sequence[Series], groups: int) -> Stretches:
    """Over every step that any run logged."""
    steps = [series.steps for series in logged if len(series)]
    if not steps:
        return Stretches(0, 0, 1)
    first, last = min(int(each[0]) for each in steps), max(int(each[-1]) for each in steps)
    most = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // max(1, groups)))
    return Stretches(first, last, min(most, last - first + 1))


def curve(runs: Sequence[Series], over: Stretches) -> Curve | None:
    """None when no run has a number."""
    own = [_stretched(series, over) for series in runs if len(series)]
    if not own or not any(np.isfinite(series.values).any() for series in runs):
        return None
    kept = np.unique(np.concatenate([each.where for each in own]))
    table = np.full((5, len(own), len(kept)), np.nan)
    for k, each in enumerate(own):
        table[:, k, np.searchsorted(kept, each.where)] = each.values
    steps, mean, least, most, finite = table
    has = np.isfinite(mean).sum(axis=0)
    return Curve(
        steps=_over_runs(np.nanmean, steps),
        mean=_over_runs(np.nanmean, mean),
        low=_over_runs(np.nanmin, mean),
        high=_over_runs(np.nanmax, mean),
        lowest=_over_runs(np.nanmin, least),
        highest=_over_runs(np.nanmax, most),
        runs=has,
        broken=np.flatnonzero(np.nan_to_num(finite, nan=1.0).min(axis=0) < 1),
    )


def smoothed(values: Floats) -> tuple[Floats, int]:
    """A running mean over neighbouring points, fewer at the ends, and over how many. Gaps stay gaps."""
    width = 2 * (len(values) // 50) + 1
    known = np.isfinite(values)
    around = np.ones(width)
    half = width // 2
    total = np.convolve(np.where(known, values, 0.0), around)[half : half + len(values)]
    count = np.convolve(known.astype(float), around)[half : half + len(values)]
    return np.where(known, total / np.maximum(count, 1.0), np.nan), width


@dataclass(frozen=True, eq=False)
class _Stretched:
    where: Steps
    values: Floats  # [5, stretches]: step, mean, least, most, share of numbers


def _stretched(series: Series, over: Stretches) -> _Stretched:
    where, first = np.unique(over.of(series.steps), return_index=True)
    known = np.isfinite(series.values)
    lines = np.diff(first, append=len(series)).astype(float)
    count = np.add.reduceat(known.astype(float), first)
    total = np.add.reduceat(np.where(known, series.values, 0.0), first)
    some = np.where(count > 0, count, np.nan)
    least = np.minimum.reduceat(np.where(known, series.values, np.inf), first)
    most = np.maximum.reduceat(np.where(known, series.values, -np.inf), first)
    steps = np.add.reduceat(series.steps.astype(float), first) / lines
    inside = [np.where(count > 0, each, np.nan) for each in (total / some, least, most)]
    return _Stretched(where, np.stack([steps, *inside, count / lines]))


def _over_runs(how: object, values: Floats) -> Floats:
    """nan where no run has a number."""
    found = np.full(values.shape[1], np.nan)
    some = np.isfinite(values).any(axis=0)
    found[some] = how(values[:, some], axis=0)  # type: ignore[operator]
    return found
