"""How sure a difference between two groups of runs is: a paired bootstrap over the images that all answered.

Counts by image come in, differences with intervals go out. A rate is a ratio of two sums over images; a group's
value is the mean over its seeds. A resample draws as many images as there are, with replacement, the same for
every run, so that what makes an image hard for all of them cancels out. The 95 % interval is the middle of the
resampled differences: it speaks of other images, with these very weights.

Of other seeds a bootstrap over three of them would say too little: it draws from ten sets, and its variance is a
third too small. From three seeds in both groups on there is a second interval instead: the variance over images
and that of the means over seeds added up, and Student's t with Welch's degrees of freedom. What seeds and images
do together is in both variances, so that it is rather too wide than too narrow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordexp.inspector.report.series import Floats

LEVEL = 0.95
SEED = 20_250  # of the resamples: the same page comes out again
CELLS = 2_000_000  # drawn at a time
FEWEST_SEEDS = 3
MOST_UNDEFINED = 0.05  # of resamples in which a rate is a share of nothing; with more it has no interval

RunCounts = Mapping[str, NDArray[np.int64]]  # of one run: by rate, [images, 2]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Difference:
    """`base` and `other` are means over seeds. `agreeing` is the share of resamples in which the difference has
    the sign that it has; None when it is 0. `with_seeds` is None with fewer than three seeds on a side."""

    name: str
    base: float
    other: float
    images: Interval | None
    agreeing: float | None
    with_seeds: Interval | None

    @property
    def value(self) -> float:
        return self.other - self.base

    @property
    def clear(self) -> bool:
        """Every interval that there is leaves out 0."""
        known = [interval for interval in (self.images, self.with_seeds) if interval is not None]
        return bool(known) and all(low > 0 or high < 0 for low, high in known)


def compare(
    base: Sequence[RunCounts], other: Sequence[RunCounts], *, resamples: int, seed: int = SEED
) -> list[Difference]:
    """Of every rate that is a share of something in all runs. All counts are of the same images in one order."""
    runs = [*base, *other]
    names = [name for name in base[0] if all(run[name][:, 1].sum() for run in runs)]
    columns = np.concatenate([run[name] for run in runs for name in names], axis=1).astype(float)
    whole = _rates(columns.sum(axis=0)[None], len(runs), len(names))[0]
    drawn = _rates(resampled_sums(columns, resamples, seed), len(runs), len(names))
    return [_difference(name, whole[:, k], drawn[:, :, k], len(base)) for k, name in enumerate(names)]


def resampled_sums(columns: Floats, resamples: int, seed: int) -> Floats:
    """[resamples, columns]: sums over as many rows as there are, drawn with replacement. Equal columns,
    as many denominators are, are summed once."""
    columns, again = np.unique(columns, axis=1, return_inverse=True)
    rows, rng = len(columns), np.random.default_rng(seed)
    at_once = max(1, CELLS // rows)
    parts = []
    for start in range(0, resamples, at_once):
        count = min(at_once, resamples - start)
        drawn = rng.integers(0, rows, (count, rows)) + np.arange(count)[:, None] * rows
        times = np.bincount(drawn.ravel(), minlength=count * rows).reshape(count, rows)
        parts.append(times.astype(float) @ columns)
    sums: Floats = np.concatenate(parts)[:, again]
    return sums


def _rates(sums: Floats, runs: int, names: int) -> Floats:
    """[resamples, runs, names]; nan as a share of nothing."""
    pairs = sums.reshape(len(sums), runs, names, 2)
    below = np.where(pairs[..., 1] > 0, pairs[..., 1], np.nan)
    rates: Floats = pairs[..., 0] / below
    return rates


def _difference(name: str, whole: Floats, drawn: Floats, base: int) -> Difference:
    """`whole` [runs] and `drawn` [resamples, runs], those of the base first."""
    value = float(whole[base:].mean() - whole[:base].mean())
    moved = drawn[:, base:].mean(axis=1) - drawn[:, :base].mean(axis=1)
    known = moved[np.isfinite(moved)]
    means = float(whole[:base].mean()), float(whole[base:].mean())
    if len(known) < (1 - MOST_UNDEFINED) * len(moved):
        return Difference(name, *means, None, None, None)
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    agreeing = float((np.sign(known) == np.sign(value)).mean()) if value else None
    with_seeds = over_seeds(whole[:base], whole[base:], float(known.var(ddof=1)))
    return Difference(name, *means, (float(low), float(high)), agreeing, with_seeds)


def over_seeds(base: Floats, other: Floats, images: float) -> Interval | None:
    """Of the difference of two means over seeds; `images` is its variance over images."""
    if min(len(base), len(other)) < FEWEST_SEEDS:
        return None
    from scipy.stats import t

    parts = [float(side.var(ddof=1)) / len(side) for side in (base, other)]
    value, total = float(other.mean() - base.mean()), images + sum(parts)
    uncertain = sum(part**2 / (len(side) - 1) for part, side in zip(parts, (base, other), strict=True))
    freedom = total**2 / uncertain if uncertain else math.inf
    half = float(t.ppf((1 + LEVEL) / 2, freedom)) * math.sqrt(total)
    return value - half, value + half
