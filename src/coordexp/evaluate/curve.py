"""Precision, recall and F1 as the score threshold falls, at IoU 0.5 with class, all classes together.

Objects enter by falling score; each either lets its image have one more pair or does not (an augmenting path), so
every point of the curve counts the best assignment of what has entered. The last point is the F1 of the report.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from coordexp.evaluate.matching import Tally
from coordexp.evaluate.scene import Scene

LOOSEST = 0.5


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Of all objects that score at least `score`."""

    score: float
    tally: Tally


def score_curve(scenes: Sequence[Scene]) -> tuple[CurvePoint, ...]:
    """A point for each score there is, from the highest. Empty unless every object has one."""
    if any(one.score is None for scene in scenes for one in scene.found):
        return ()
    true = sum(len(scene.true) for scene in scenes)
    hits = sorted((hit for scene in scenes for hit in _hits(scene)), key=lambda hit: -hit[0])
    points, pairs, found = [], 0, 0
    for value, group in groupby(hits, key=lambda hit: hit[0]):
        gains = [gain for _, gain in group]
        pairs, found = pairs + sum(gains), found + len(gains)
        points.append(CurvePoint(value, Tally(pairs, found, true)))
    return tuple(points)


def best_point(points: Sequence[CurvePoint]) -> CurvePoint | None:
    """Where F1 is highest; of equal ones the one that keeps fewest."""
    return max(points, key=lambda point: point.tally.f1 or 0.0, default=None)


def thinned(points: Sequence[CurvePoint], most: int = 200) -> list[CurvePoint]:
    """Evenly chosen, with the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[k] for k in np.linspace(0, len(points) - 1, most).round().astype(int)]


def _hits(scene: Scene) -> Iterator[tuple[float, bool]]:
    """By falling score, whether each object adds a pair to its image."""
    order = sorted(range(len(scene.found)), key=lambda i: -(scene.found[i].score or 0.0))
    possible = [
        [j for j, true in enumerate(scene.true) if true.desc == one.desc and scene.overlap[i, j] >= LOOSEST]
        for i, one in enumerate(scene.found)
    ]
    taken: dict[int, int] = {}
    for i in order:
        value = scene.found[i].score
        assert value is not None
        yield value, _augment(i, possible, taken, set())


def _augment(i: int, possible: list[list[int]], taken: dict[int, int], tried: set[int]) -> bool:
    """Finds object `i` a true one, moving others to another where needed."""
    for j in possible[i]:
        if j not in tried:
            tried.add(j)
            if j not in taken or _augment(taken[j], possible, taken, tried):
                taken[j] = i
                return True
    return False
