"""How many objects were found: precision, recall and F1 at ten thresholds of IoU, with and without class.

At each threshold an image gets the assignment with the most pairs and, among those, the largest total IoU. It does
not depend on scores or on the order of the answer, so F1 says what was found and AP how well it was ranked. A pair
has the same `desc`, letter by letter, unless classes are left out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.correction.candidates import Floats
from coordexp.correction.match import assign
from coordexp.evaluate.scene import Scene

THRESHOLDS = tuple(k / 100 for k in range(50, 100, 5))
MANY = 1e6  # what leaving two objects alone costs: more than any sum of IoUs can win

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tally:
    """`pairs` of `found` predicted and `true` objects. A share of nothing is None, not 0."""

    pairs: int
    found: int
    true: int

    @property
    def precision(self) -> float | None:
        return self.pairs / self.found if self.found else None

    @property
    def recall(self) -> float | None:
        return self.pairs / self.true if self.true else None

    @property
    def f1(self) -> float | None:
        return 2 * self.pairs / (self.found + self.true) if self.found + self.true else None

    @property
    def errors(self) -> int:
        """Missed and extra objects."""
        return self.found + self.true - 2 * self.pairs


@dataclass(frozen=True, slots=True)
class Scores:
    """One tally a threshold; `mean_iou` of the pairs at 0.5, the loosest."""

    tallies: tuple[Tally, ...]
    mean_iou: float | None

    def at(self, threshold: float) -> Tally:
        return self.tallies[THRESHOLDS.index(threshold)]

    def mean(self, name: str) -> float | None:
        """Of precision, recall or f1 over 0.50:0.05:0.95."""
        values = [getattr(tally, name) for tally in self.tallies]
        return None if None in values else float(np.mean(values))


@dataclass(frozen=True, slots=True)
class Matching:
    """The pairs of an image, predicted with true, at each threshold."""

    with_class: tuple[tuple[Pair, ...], ...]
    any_class: tuple[tuple[Pair, ...], ...]


def match_scene(scene: Scene, thresholds: Sequence[float] = THRESHOLDS) -> Matching:
    if not scene.overlap.size:
        nothing: tuple[tuple[Pair, ...], ...] = ((),) * len(thresholds)
        return Matching(nothing, nothing)
    same = np.equal.outer([one.desc for one in scene.found], [one.desc for one in scene.true])
    return Matching(_at_all(np.where(same, scene.overlap, 0.0), thresholds), _at_all(scene.overlap, thresholds))


def score(scenes: Sequence[Scene], matchings: Sequence[Matching], *, with_class: bool) -> Scores:
    found, true = (sum(len(getattr(scene, side)) for scene in scenes) for side in ("found", "true"))
    chosen = [matching.with_class if with_class else matching.any_class for matching in matchings]
    pairs = [sum(len(each[k]) for each in chosen) for k in range(len(THRESHOLDS))]
    overlaps = [scene.overlap[i, j] for scene, each in zip(scenes, chosen, strict=True) for i, j in each[0]]
    return Scores(tuple(Tally(count, found, true) for count in pairs), _mean(overlaps))


def score_by_class(scenes: Sequence[Scene], matchings: Sequence[Matching]) -> dict[str, Scores]:
    """For each class of the truth, by name. Predictions of any other class are in no row, only in the total."""
    true = Counter(one.desc for scene in scenes for one in scene.true)
    found = Counter(one.desc for scene in scenes for one in scene.found)
    pairs: list[Counter[str]] = [Counter() for _ in THRESHOLDS]
    overlaps: dict[str, list[float]] = {desc: [] for desc in true}
    for scene, matching in zip(scenes, matchings, strict=True):
        for counter, each in zip(pairs, matching.with_class, strict=True):
            counter.update(scene.true[j].desc for _, j in each)
        for i, j in matching.with_class[0]:
            overlaps[scene.true[j].desc].append(scene.overlap[i, j])
    return {
        desc: Scores(tuple(Tally(each[desc], found[desc], true[desc]) for each in pairs), _mean(overlaps[desc]))
        for desc in sorted(true)
    }


def _at_all(overlap: Floats, thresholds: Sequence[float]) -> tuple[tuple[Pair, ...], ...]:
    result: list[tuple[Pair, ...]] = []
    for threshold in thresholds:
        possible = overlap >= threshold
        result.append(tuple(assign(overlap, possible, MANY)) if possible.any() else ())
    return tuple(result)


def _mean(values: Iterable[float]) -> float | None:
    kept = list(values)
    return float(np.mean(kept)) if kept else None
