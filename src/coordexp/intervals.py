"""How certain numbers about images are: 95 % intervals of estimates and of differences.

A number is a function of sums over images; that of a group of runs is the mean over its seeds. `jackknife` gives
the variance of any. Rates, which are ratios of two sums, are compared by a bootstrap: a resample draws as many
images as there are, with replacement, and the same ones for every run, so an image that is hard for all runs
cancels out. The interval covers the middle of the resampled differences: it is for other images, same weights.

It says nothing about other seeds, and a bootstrap over three seeds would be overconfident: it draws from only ten
sets, and its variance is a third too small. With at least three seeds in both groups, or two pairs, there is a
second interval, with Student's t and Welch's degrees of freedom. It adds the variance over images and that of the
means over seeds. The interaction of both is in either, so this interval is too wide rather than too narrow.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
SEED = 20_250  # of the resamples, so that the same page comes out again
CELLS = 2_000_000  # drawn at a time
MIN_SEEDS, MIN_PAIRS = 3, 2  # for an interval over seeds: of each group, and of paired groups
MAX_UNDEFINED = 0.05  # of resamples in which the denominator of a rate is 0; with more, it has no interval

Floats = NDArray[np.float64]
RunCounts = Mapping[str, NDArray[np.int64]]  # of one run, by rate: [images, 2], numerator and denominator
Interval = tuple[float, float]

NEED_ALL_LABELS = ("f1", "precision", "ap", "over_count", "boxes_on_empty", "absent_classes", "unknown_class")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} (95 %: {self.low:.2f} to {self.high:.2f})"

    def describe_difference(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f} to {self.high:+.3f}]"

    def describe_verdict(self, measure: str, advice: str, letters: str = "AB") -> str:
        """Return which of two models to use, of which this is the difference in a measure, or the advice."""
        better = letters[1] if self.low > 0 else letters[0] if self.high < 0 else None
        verdict = f"use {better}" if better else f"no clear difference; {advice}"
        return f"{letters[1]}: {measure} {self.describe_difference()}: {verdict}"


def student(images: int) -> float:
    """Return the number of standard errors on each side of an estimate from this many images."""
    from scipy.stats import t

    return float(t.ppf((1 + LEVEL) / 2, max(1, images - 1)))


def jackknife(columns: Floats, statistic: Callable[[Floats], Floats]) -> tuple[Floats, Floats]:
    """Return a statistic of the sums of the columns, [images, columns], and its variance."""
    sums, images = columns.sum(axis=0), len(columns)
    without = statistic(sums - columns)
    return statistic(sums), (images - 1) * without.var(axis=0)


def wilson(value: float, variance: float, trials: float, images: int) -> Estimate:
    """Return the interval of a share that is known from at most this many trials."""
    value, t = min(1.0, max(0.0, value)), student(images)
    if variance > 0:
        trials = min(trials, value * (1 - value) / variance) or trials
    scale = 1 + t**2 / trials
    centre = (value + t**2 / (2 * trials)) / scale
    half = t / scale * np.sqrt(value * (1 - value) / trials + t**2 / (4 * trials**2))
    return Estimate(value, max(0.0, float(centre - half)), min(1.0, float(centre + half)))


@dataclass(frozen=True)
class RateDifference:
    """`base` and `other` are means over seeds. `seed_interval` is None with fewer than three seeds on a side. A
    rate is biased if it takes objects without a label for mistakes, and labels are incomplete."""

    name: str
    base: float
    other: float
    image_interval: Interval | None
    seed_interval: Interval | None
    is_biased: bool = False

    @property
    def value(self) -> float:
        return self.other - self.base

    @property
    def is_clear(self) -> bool:
        """Whether there is an interval, none of them contains 0, and the labels can tell."""
        known = [interval for interval in (self.image_interval, self.seed_interval) if interval is not None]
        return not self.is_biased and bool(known) and all(low > 0 or high < 0 for low, high in known)

    @property
    def is_quality(self) -> bool:
        """Whether higher is better. All other rates are of behaviour."""
        return self.name == "ap" or "_50" in self.name

    def describe(self, with_seeds: bool) -> list[str]:
        """Return the cells of a table: both values, the difference and the intervals."""
        intervals = [self.image_interval, *([self.seed_interval] if with_seeds else [])]
        difference = "0" if self.value == 0 else f"{self.value:+.4f}"
        return [f"{self.base:.4f}", f"{self.other:.4f}", difference, *map(describe_interval, intervals)]


def describe_interval(interval: Interval | None) -> str:
    if interval == (0.0, 0.0):
        return "no image differs"
    return "-" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}"


def mark_biased(rows: Sequence[RateDifference]) -> list[RateDifference]:
    """Return the differences, with a mark at those that mean little if labels are incomplete."""
    return [replace(row, is_biased=row.name.startswith(NEED_ALL_LABELS)) for row in rows]


def bootstrap_differences(
    base: Sequence[RunCounts], other: Sequence[RunCounts], *, resamples: int = 2000, paired: bool = False
) -> list[RateDifference]:
    """Return the differences of all rates whose denominator is not 0 in any run. All counts must be of the same
    images in the same order, and those of paired groups in the same order of seeds."""
    runs = [*base, *other]
    names = [name for name in base[0] if all(run[name][:, 1].sum() for run in runs)]
    columns = np.concatenate([run[name] for run in runs for name in names], axis=1).astype(float)
    whole = _to_rates(columns.sum(axis=0)[None], len(runs), len(names))[0]
    drawn = _to_rates(resample_sums(columns, resamples), len(runs), len(names))
    return [_estimate(name, whole[:, k], drawn[:, :, k], len(base), paired) for k, name in enumerate(names)]


def resample_sums(columns: Floats, resamples: int) -> Floats:
    """Return [resamples, columns]: sums over as many rows as there are, drawn with replacement."""
    rows, rng = len(columns), np.random.default_rng(SEED)
    batch = max(1, CELLS // rows)
    parts = []
    for start in range(0, resamples, batch):
        count = min(batch, resamples - start)
        drawn = rng.integers(0, rows, (count, rows)) + np.arange(count)[:, None] * rows
        times = np.bincount(drawn.ravel(), minlength=count * rows).reshape(count, rows)
        parts.append(times.astype(float) @ columns)
    sums: Floats = np.concatenate(parts)
    return sums


def _to_rates(sums: Floats, runs: int, names: int) -> Floats:
    """Return [resamples, runs, names]; nan where the denominator is 0."""
    pairs = sums.reshape(len(sums), runs, names, 2)
    below = np.where(pairs[..., 1] > 0, pairs[..., 1], np.nan)
    rates: Floats = pairs[..., 0] / below
    return rates


def _estimate(name: str, whole: Floats, drawn: Floats, base: int, paired: bool) -> RateDifference:
    """`whole` is [runs] and `drawn` [resamples, runs]. The first `base` runs are those of the base group."""
    differences = drawn[:, base:].mean(axis=1) - drawn[:, :base].mean(axis=1)
    known = differences[np.isfinite(differences)]
    means = float(whole[:base].mean()), float(whole[base:].mean())
    if len(known) < (1 - MAX_UNDEFINED) * len(differences):
        return RateDifference(name, *means, None, None)
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    sides = [whole[base:] - whole[:base]] if paired else [whole[:base], whole[base:]]
    over_seeds = estimate_seed_interval(means[1] - means[0], float(known.var(ddof=1)), sides)
    return RateDifference(name, *means, (float(low), float(high)), over_seeds)


def estimate_seed_interval(value: float, image_variance: float, sides: Sequence[Floats]) -> Interval | None:
    """Return the interval of the difference of two means over seeds, or None with too few seeds. `image_variance`
    is that of the difference over images. `sides` are the values of both groups, or the differences of their
    pairs."""
    if min(map(len, sides)) < (MIN_SEEDS if len(sides) > 1 else MIN_PAIRS):
        return None
    from scipy.stats import t

    variances = [float(side.var(ddof=1)) / len(side) for side in sides]
    total = image_variance + sum(variances)
    uncertain = sum(part**2 / (len(side) - 1) for part, side in zip(variances, sides, strict=True))
    half = float(t.ppf((1 + LEVEL) / 2, total**2 / uncertain if uncertain else math.inf)) * math.sqrt(total)
    return value - half, value + half
