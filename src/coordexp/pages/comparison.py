"""Compare groups of runs on the same held-out images, with intervals for the differences.

Runs are never compared on different data. The method is a paired bootstrap over the images that all runs answered.
A rate is a ratio of two sums over images, and a group's value is the mean over its seeds. A resample draws as many
images as there are, with replacement, and the same ones for every run. An image that is hard for all runs
therefore cancels out. The 95 % interval covers the middle of the resampled differences: it predicts other images
with the same weights.

It says nothing about other seeds, and a bootstrap over three seeds would be overconfident: it draws from only ten
sets, and its variance is a third too small. With at least three seeds in both groups there is a second interval.
It adds the variance over images and the variance of the means over seeds, and uses Student's t with Welch's
degrees of freedom. The interaction of seeds and images is in both variances, so this interval is too wide rather
than too narrow.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordexp.errors import DataError
from coordexp.pages.curves import Floats
from coordexp.pages.run_folder import MANIFEST, DataFile, Run, RunGroup

LEVEL = 0.95
SEED = 20_250  # of the resamples, so that the same page comes out again
CELLS = 2_000_000  # drawn at a time
MIN_SEEDS = 3
MAX_UNDEFINED = 0.05  # of resamples in which the denominator of a rate is 0; with more, it has no interval

NEED_ALL_LABELS = (
    "f1",
    "precision",
    "ap",
    "over_count",
    "boxes_on_empty",
    "absent_classes",
    "unknown_class",
)  # how names begin
INCOMPLETE = (
    "Labels are incomplete (custom.val_labels). F1, precision, AP and some rates of behaviour take an object "
    "without a label for a mistake, and are called neither better nor worse: use `coordexp evaluate --judged`."
)

RunCounts = Mapping[str, NDArray[np.int64]]  # of one run, by rate: [images, 2], numerator and denominator
Interval = tuple[float, float]
StepsByGroup = dict[str, tuple[int, ...]]  # by the letter of the group, one step per run


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


@dataclass(frozen=True)
class GroupComparison:
    """The rates of two groups. AP has no interval: it is that of both groups as logged."""

    base: RunGroup
    other: RunGroup
    rows: tuple[RateDifference, ...]

    @property
    def has_seed_intervals(self) -> bool:
        return any(row.seed_interval is not None for row in self.rows)


@dataclass(frozen=True)
class ComparisonResult:
    """Every group after the first is compared with the first."""

    images: int
    resamples: int
    steps: StepsByGroup
    comparisons: tuple[GroupComparison, ...]
    notes: tuple[str, ...]


def compare_groups(
    groups: Sequence[RunGroup], step: int | None, resamples: int, data: Path | None, notify: Callable[[str], None]
) -> ComparisonResult:
    """Compare groups for which `reason_not_to_compare` returned None: at this step, or at the last evaluation of
    each run. `data` says where the held-out records are now. Raise DataError if files are missing or do not
    fit."""
    from coordexp.data import open_data
    from coordexp.evaluate import count_by_image, read_predictions, read_truth

    steps = {group.letter: tuple(choose_step(run, step) for run in group.runs) for group in groups}
    truth = read_truth(open_data([find_held_out_files(groups[0].runs[0], data)]))
    counts: dict[str, list[RunCounts]] = {}
    evaluated: set[int] = set()  # the images that the first run was evaluated on
    for group in groups:
        for run, at in zip(group.runs, steps[group.letter], strict=True):
            notify(f"{run.name}, step {at}")
            answers = read_predictions(run.folder / "evaluations" / f"step-{at}.json", truth)
            answered = {answer.image_id for answer in answers}
            evaluated = evaluated or answered
            if answered != evaluated:
                raise DataError(
                    f"{groups[0].runs[0].name} was evaluated on {len(evaluated)} images and {run.name} on "
                    f"{len(answered)}, which are not the same",
                    "compare runs with the same custom.eval_samples, or leave out the comparison with --at none",
                )
            images = [(image_id, record) for image_id, record in truth if image_id in answered]
            counts.setdefault(group.letter, []).append(count_by_image(images, answers))
    notify(f"{resamples} resamples")
    base, notes = groups[0], _note_different_steps(groups, steps)
    has_complete_labels = all(run.has_complete_labels for group in groups for run in group.runs)
    if not has_complete_labels:
        notes.append(INCOMPLETE)

    def compare_with_base(other: RunGroup) -> GroupComparison:
        rows = bootstrap_differences(counts[base.letter], counts[other.letter], resamples=resamples)
        rows += _read_average_precision(base, other, steps)
        return GroupComparison(base, other, tuple(rows if has_complete_labels else mark_biased(rows)))

    comparisons = tuple(map(compare_with_base, groups[1:]))
    return ComparisonResult(len(evaluated), resamples, steps, comparisons, tuple(notes))


def reason_not_to_compare(groups: Sequence[RunGroup]) -> str | None:
    """Return None if there are several groups and all runs were evaluated on the same data."""
    if len(groups) < 2:
        return "there is only one group of runs"
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        if not find_evaluated_steps(run):
            return f"{run.name} has no evaluation in {run.folder / 'evaluations'}"
        if "val" not in run.data:
            return f"{run.folder / MANIFEST} names no held-out data"
    files = {(file := run.data["val"]).sha256: (run.name, file) for run in runs}
    if len(files) > 1:
        words = "; ".join(
            f"{name}: {file.file}, {file.records} records, sha256 {file.sha256[:8]}"
            for name, file in files.values()
        )
        return f"the runs were evaluated on different data ({words})"
    return None


def find_evaluated_steps(run: Run) -> tuple[int, ...]:
    """Return the steps whose evaluations left their predictions."""
    names = (path.stem.removeprefix("step-") for path in (run.folder / "evaluations").glob("step-*.json"))
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


def choose_step(run: Run, step: int | None) -> int:
    steps = find_evaluated_steps(run)
    if step is None:
        return steps[-1]
    if step not in steps:
        raise DataError(
            f"{run.folder}: no evaluation at step {step}",
            f"there is one at {', '.join(map(str, steps))}; give one of them with --at, or --at last",
        )
    return step


def find_held_out_files(logged: Run, given: Path | None) -> list[Path]:
    """Return the files that the run was evaluated on: `given`, or those that `run.json` names, relative to here or
    to where the run was started. Raise DataError if the hash of a file differs from that in `run.json`."""
    expected = logged.data["val"]
    return [_find_held_out_file(logged, data, given) for data in expected.files or [expected]]


def _find_held_out_file(logged: Run, expected: DataFile, given: Path | None) -> Path:
    path = given or Path(expected.file)
    if not path.is_file() and logged.start_folder and not given:
        path = logged.start_folder / expected.file
    where = "say where the file of the run is with --data FILE, or leave out the comparison with --at none"
    if not path.is_file():
        raise DataError(f"{path}: no such file, but {logged.name} was evaluated on it", where)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected.sha256:
        raise DataError(
            f"{path}: its hash is {digest[:12]}, but {logged.name} was evaluated on {expected.sha256[:12]} "
            f"({expected.records} records)",
            f"the file has changed, or is another one; {where}",
        )
    return path


def _read_average_precision(base: RunGroup, other: RunGroup, steps: StepsByGroup) -> list[RateDifference]:
    """Return the means over seeds as a row without intervals, or nothing if a run did not log it."""
    means = []
    for group in (base, other):
        logged = [
            run.series("eval_ap").at(step) for run, step in zip(group.runs, steps[group.letter], strict=True)
        ]
        means.append(sum(logged) / len(logged))
    return [] if math.isnan(sum(means)) else [RateDifference("ap", means[0], means[1], None, None)]


def _note_different_steps(groups: Sequence[RunGroup], steps: StepsByGroup) -> list[str]:
    if len({step for group_steps in steps.values() for step in group_steps}) == 1:
        return []
    shared = set.intersection(*(set(find_evaluated_steps(run)) for group in groups for run in group.runs))
    words = "; ".join(f"{letter} {', '.join(map(str, group_steps))}" for letter, group_steps in steps.items())
    advice = f"--at {max(shared)} compares all at the last step they share" if shared else "they share no step"
    return [f"The last evaluations are of different steps ({words}); {advice}."]


def mark_biased(rows: Sequence[RateDifference]) -> list[RateDifference]:
    """Return the differences, with a mark at those that mean little if labels are incomplete."""
    return [replace(row, is_biased=row.name.startswith(NEED_ALL_LABELS)) for row in rows]


def bootstrap_differences(
    base: Sequence[RunCounts], other: Sequence[RunCounts], *, resamples: int, seed: int = SEED
) -> list[RateDifference]:
    """Return the differences of all rates whose denominator is not 0 in any run. All counts must be of the same
    images in the same order."""
    runs = [*base, *other]
    names = [name for name in base[0] if all(run[name][:, 1].sum() for run in runs)]
    columns = np.concatenate([run[name] for run in runs for name in names], axis=1).astype(float)
    whole = _to_rates(columns.sum(axis=0)[None], len(runs), len(names))[0]
    drawn = _to_rates(resample_sums(columns, resamples, seed), len(runs), len(names))
    return [_estimate(name, whole[:, k], drawn[:, :, k], len(base)) for k, name in enumerate(names)]


def resample_sums(columns: Floats, resamples: int, seed: int) -> Floats:
    """Return [resamples, columns]: sums over as many rows as there are, drawn with replacement."""
    rows, rng = len(columns), np.random.default_rng(seed)
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


def _estimate(name: str, whole: Floats, drawn: Floats, base: int) -> RateDifference:
    """`whole` is [runs] and `drawn` [resamples, runs]. The first `base` runs are those of the base group."""
    differences = drawn[:, base:].mean(axis=1) - drawn[:, :base].mean(axis=1)
    known = differences[np.isfinite(differences)]
    means = float(whole[:base].mean()), float(whole[base:].mean())
    if len(known) < (1 - MAX_UNDEFINED) * len(differences):
        return RateDifference(name, *means, None, None)
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    over_seeds = estimate_seed_interval(whole[:base], whole[base:], float(known.var(ddof=1)))
    return RateDifference(name, *means, (float(low), float(high)), over_seeds)


def estimate_seed_interval(base: Floats, other: Floats, image_variance: float) -> Interval | None:
    """Return the interval for the difference of two means over seeds, or None with too few seeds.
    `image_variance` is the variance of the difference over images."""
    if min(len(base), len(other)) < MIN_SEEDS:
        return None
    from scipy.stats import t

    variances = [float(side.var(ddof=1)) / len(side) for side in (base, other)]
    value, total = float(other.mean() - base.mean()), image_variance + sum(variances)
    uncertain = sum(part**2 / (len(side) - 1) for part, side in zip(variances, (base, other), strict=True))
    freedom = total**2 / uncertain if uncertain else math.inf
    half = float(t.ppf((1 + LEVEL) / 2, freedom)) * math.sqrt(total)
    return value - half, value + half
