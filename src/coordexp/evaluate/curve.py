"""Precision, recall and F1 as the score threshold falls, at IoU 0.5 with class, for all classes together.

Objects are added by falling score. Each one either gives its image another pair or does not (an augmenting path),
so every point of the curve counts the best assignment of the objects so far. The last point is the F1 of the
report.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from coordexp.evaluate.comparison import ImageComparison
from coordexp.evaluate.matching import MatchCounts

LOOSEST = 0.5


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
    return max(points, key=_f1, default=None)


def thin_curve(points: Sequence[CurvePoint], most: int = 200) -> list[CurvePoint]:
    """Return at most `most` points, evenly spaced, including the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[k] for k in np.linspace(0, len(points) - 1, most).round().astype(int)]


def _f1(point: CurvePoint) -> float:
    return point.counts.f1 or 0.0


def _find_gains(image: ImageComparison) -> Iterator[tuple[float, bool]]:
    """Yield the score of each object, by falling score, and whether it adds a pair to its image."""
    possible = [
        [j for j, true in enumerate(image.true) if true.desc == item.desc and image.overlap[i, j] >= LOOSEST]
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
