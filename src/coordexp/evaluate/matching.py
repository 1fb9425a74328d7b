"""Precision, recall and F1 at ten thresholds of IoU, with and without class.

At each threshold an image gets the assignment with the most pairs and, among those, the largest total IoU. It does
not depend on scores or on the order of the answer: F1 measures what was detected, and AP how well it was ranked.
The two objects of a pair have exactly the same `desc`, unless classes are ignored.

A curve shows the counts as the score threshold falls, at IoU 0.5 with class, for all classes together. Objects
are added by falling score. Each one either gives its image another pair or does not (an augmenting path), so every
point counts the best assignment of the objects so far. The last point has the F1 of the report.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from coordexp.answers.match import Floats, assign, have_same_name
from coordexp.evaluate.comparison import ImageComparison

THRESHOLDS = tuple(k / 100 for k in range(50, 100, 5))
MANY = 1e6  # the cost of leaving two objects unpaired: more than any sum of IoUs can save

Pair = tuple[int, int]  # of a predicted and a true object


@dataclass(frozen=True, slots=True)
class MatchCounts:
    """The numbers of pairs, predicted objects and true objects. A share of nothing is None, not 0."""

    pairs: int
    predicted: int
    true: int

    def __add__(self, other: "MatchCounts") -> "MatchCounts":
        return MatchCounts(self.pairs + other.pairs, self.predicted + other.predicted, self.true + other.true)

    @property
    def precision(self) -> float | None:
        return self.pairs / self.predicted if self.predicted else None

    @property
    def recall(self) -> float | None:
        return self.pairs / self.true if self.true else None

    @property
    def f1(self) -> float | None:
        return 2 * self.pairs / (self.predicted + self.true) if self.predicted + self.true else None

    @property
    def errors(self) -> int:
        """The number of missed objects and false positives."""
        return self.predicted + self.true - 2 * self.pairs


@dataclass(frozen=True, slots=True)
class MatchScores:
    """The counts at each threshold, and the mean IoU of the pairs at 0.5, the lowest threshold."""

    per_threshold: tuple[MatchCounts, ...]
    mean_iou: float | None

    def at(self, threshold: float) -> MatchCounts:
        return self.per_threshold[THRESHOLDS.index(threshold)]

    def mean(self, name: str) -> float | None:
        """Return the mean of precision, recall or f1 over 0.50:0.05:0.95."""
        values = [getattr(counts, name) for counts in self.per_threshold]
        return None if None in values else float(np.mean(values))


@dataclass(frozen=True, slots=True)
class Matching:
    """The pairs of an image at each threshold."""

    with_class: tuple[tuple[Pair, ...], ...]
    any_class: tuple[tuple[Pair, ...], ...]


def match_image(image: ImageComparison, thresholds: Sequence[float] = THRESHOLDS) -> Matching:
    if not image.overlap.size:
        nothing: tuple[tuple[Pair, ...], ...] = ((),) * len(thresholds)
        return Matching(nothing, nothing)
    same = have_same_name([item.desc for item in image.predicted], [item.desc for item in image.true])
    return Matching(
        assign_at(thresholds, np.where(same, image.overlap, 0.0)), assign_at(thresholds, image.overlap)
    )


def score(
    comparisons: Sequence[ImageComparison], matchings: Sequence[Matching], *, with_class: bool
) -> MatchScores:
    """Return the scores of all images together."""
    predicted = sum(len(image.predicted) for image in comparisons)
    true = sum(len(image.true) for image in comparisons)
    chosen = [matching.with_class if with_class else matching.any_class for matching in matchings]
    counts = [sum(len(pairs[k]) for pairs in chosen) for k in range(len(THRESHOLDS))]
    overlaps = [image.overlap[i, j] for image, pairs in zip(comparisons, chosen, strict=True) for i, j in pairs[0]]
    return MatchScores(tuple(MatchCounts(count, predicted, true) for count in counts), _mean(overlaps))


def score_by_class(
    comparisons: Sequence[ImageComparison], matchings: Sequence[Matching]
) -> dict[str, MatchScores]:
    """Return the scores of each class of the ground truth, by name. Predictions of other classes count only in the
    total."""
    true = Counter(item.desc for image in comparisons for item in image.true)
    predicted = Counter(item.desc for image in comparisons for item in image.predicted)
    per_threshold: list[Counter[str]] = [Counter() for _ in THRESHOLDS]
    overlaps: dict[str, list[float]] = {desc: [] for desc in true}
    for image, matching in zip(comparisons, matchings, strict=True):
        for counter, pairs in zip(per_threshold, matching.with_class, strict=True):
            counter.update(image.true[j].desc for _, j in pairs)
        for i, j in matching.with_class[0]:
            overlaps[image.true[j].desc].append(image.overlap[i, j])
    return {
        desc: MatchScores(
            tuple(MatchCounts(counter[desc], predicted[desc], true[desc]) for counter in per_threshold),
            _mean(overlaps[desc]),
        )
        for desc in sorted(true)
    }


def count_by_classes_asked(
    comparisons: Sequence[ImageComparison], matchings: Sequence[Matching]
) -> dict[int, MatchCounts]:
    """Return the counts at the lowest threshold, with class, by the number of classes that a record asks for.
    Records without a list of classes are left out."""
    counts: dict[int, MatchCounts] = {}
    for image, matching in zip(comparisons, matchings, strict=True):
        if image.record.classes is not None:
            own = MatchCounts(len(matching.with_class[0]), len(image.predicted), len(image.true))
            number = len(image.record.classes)
            counts[number] = counts[number] + own if number in counts else own
    return dict(sorted(counts.items()))


def assign_at(thresholds: Sequence[float], overlap: Floats) -> tuple[tuple[Pair, ...], ...]:
    result: list[tuple[Pair, ...]] = []
    for threshold in thresholds:
        possible = overlap >= threshold
        result.append(tuple(assign(overlap, possible, MANY)) if possible.any() else ())
    return tuple(result)


def _mean(values: Iterable[float]) -> float | None:
    kept = list(values)
    return float(np.mean(kept)) if kept else None


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The counts of all objects that score at least `score`."""

    score: float
    counts: MatchCounts


def score_curve(comparisons: Sequence[ImageComparison]) -> tuple[CurvePoint, ...]:
    """Return a point for each score that occurs, from the highest. Return none if an object has no score."""
    if any(item.score is None for image in comparisons for item in image.predicted):
        return ()
    true = sum(len(image.true) for image in comparisons)
    gains = sorted((gain for image in comparisons for gain in _find_gains(image)), key=itemgetter(0), reverse=True)
    points, pairs, predicted = [], 0, 0
    for value, group in groupby(gains, key=itemgetter(0)):
        gained = [has_pair for _, has_pair in group]
        pairs, predicted = pairs + sum(gained), predicted + len(gained)
        points.append(CurvePoint(value, MatchCounts(pairs, predicted, true)))
    return tuple(points)


def best_point(points: Sequence[CurvePoint]) -> CurvePoint | None:
    """Return the point with the highest F1; of equal ones, the point with the fewest objects."""
    return max(points, key=lambda point: point.counts.f1 or 0.0, default=None)


def thin_curve(points: Sequence[CurvePoint], most: int = 200) -> list[CurvePoint]:
    """Return at most `most` points, evenly spaced, including the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[k] for k in np.linspace(0, len(points) - 1, most).round().astype(int)]


def _find_gains(image: ImageComparison) -> Iterator[tuple[float, bool]]:
    """Yield the score of each object, by falling score, and whether it adds a pair to its image."""
    possible = [
        [j for j, true in enumerate(image.true) if true.desc == item.desc and image.overlap[i, j] >= THRESHOLDS[0]]
        for i, item in enumerate(image.predicted)
    ]
    scores = [item.score or 0.0 for item in image.predicted]
    taken: dict[int, int] = {}
    for i in sorted(range(len(scores)), key=scores.__getitem__, reverse=True):
        yield scores[i], _augment(i, possible, taken, set())


def _augment(i: int, possible: list[list[int]], taken: dict[int, int], tried: set[int]) -> bool:
    """Pair object `i` with a true one, moving other objects to another true one if needed. Return True on
    success."""
    for j in possible[i]:
        if j not in tried:
            tried.add(j)
            if j not in taken or _augment(taken[j], possible, taken, tried):
                taken[j] = i
                return True
    return False
