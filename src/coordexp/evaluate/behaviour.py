"""How a model behaves beside what it finds: repeats, broken objects, stopping too early, far too large boxes.

Each is a rate with its numerator and denominator. `DEFINITIONS` says what is counted, and is what reports print.
"Matched" is at IoU 0.5, with class for duplicates and without for sizes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.evaluate.matching import Matching
from coordexp.evaluate.scene import Scene
from coordexp.evaluate.shapes import boxes_of, iou

SAME = 0.9  # IoU from which two predictions are one
TOO_LARGE = 4.0  # times the area of the true object it stands for
NEARLY_ALL = 0.9  # of the image

DEFINITIONS = {
    "duplicates": "unmatched objects that repeat a matched or an earlier one (same desc, IoU >= 0.9); of valid"
    " objects",
    "invalid": "objects that the parser refused; of all objects",
    "unknown_class": "objects of a desc that no true object of the data has; of valid objects",
    "oversized": "unmatched objects whose box is over 4 times that of the nearest true one, or over 90 % of an"
    " image in which no true one is; of valid objects",
    "truncated": "answers cut off at the token limit; of all answers",
    "unreadable": "answers that do not begin with {, so that nothing of them is read; of all answers",
    "early_stop": "answers with fewer valid objects than true ones; of those that stopped by themselves",
    "over_count": "answers with more valid objects than true ones; of all answers",
    "boxes_on_empty": "images without a true object that got a valid one; of all such images",
}


@dataclass(frozen=True, slots=True)
class Rate:
    count: int
    of: int

    @property
    def value(self) -> float | None:
        """None of nothing."""
        return self.count / self.of if self.of else None


@dataclass(frozen=True, slots=True)
class Behaviour:
    """`rates` by the names of `DEFINITIONS`; the reasons of invalid objects and the unknown descs, most first."""

    rates: dict[str, Rate]
    reasons: dict[str, int]
    unknown: dict[str, int]


def observe(scenes: Sequence[Scene], matchings: Sequence[Matching]) -> Behaviour:
    reasons = Counter(one.reason for scene in scenes for one in scene.answer.objects if one.reason is not None)
    known = known_classes(scenes)
    unknown = Counter(one.desc for scene in scenes for one in scene.found if one.desc not in known)
    images = [observe_image(*each, known) for each in zip(scenes, matchings, strict=True)]
    rates = {
        name: Rate(sum(image[name].count for image in images), sum(image[name].of for image in images))
        for name in DEFINITIONS
    }
    return Behaviour(rates, dict(reasons.most_common()), dict(unknown.most_common()))


def known_classes(scenes: Sequence[Scene]) -> frozenset[str]:
    return frozenset(one.desc for scene in scenes for one in scene.true)


def observe_image(scene: Scene, matching: Matching, known: frozenset[str]) -> dict[str, Rate]:
    """What one image adds to each rate. `known` are the classes of the whole data."""
    valid, true, refused = len(scene.found), len(scene.true), len(scene.answer.objects) - len(scene.found)
    stopped, asked = scene.answer.finish_reason == "stop", int(scene.answer.was_asked)
    return {
        "duplicates": Rate(len(duplicates(scene, matching)), valid),
        "invalid": Rate(refused, valid + refused),
        "unknown_class": Rate(sum(one.desc not in known for one in scene.found), valid),
        "oversized": Rate(len(oversized(scene, matching)), valid),
        "truncated": Rate(int(scene.answer.truncated), asked),
        "unreadable": Rate(int(asked and not scene.answer.text.lstrip().startswith("{")), asked),
        "early_stop": Rate(int(stopped and valid < true), int(stopped)),
        "over_count": Rate(int(valid > true), asked),
        "boxes_on_empty": Rate(int(not true and valid > 0), int(not true and asked)),
    }


def duplicates(scene: Scene, matching: Matching) -> tuple[int, ...]:
    """Of several copies all but one, whichever of them the assignment took."""
    if len({one.desc for one in scene.found}) == len(scene.found):
        return ()
    shapes, descs = [one.shape for one in scene.found], [one.desc for one in scene.found]
    copies = iou(shapes, shapes, scene.record.width, scene.record.height) >= SAME
    copies &= np.equal.outer(descs, descs) & ~np.eye(len(descs), dtype=bool)
    matched = np.zeros(len(descs), dtype=bool)
    matched[[i for i, _ in matching.with_class[0]]] = True
    earlier = np.tri(len(descs), k=-1, dtype=bool)
    repeats = ~matched & (copies & (matched | earlier)).any(axis=1)
    return tuple(np.flatnonzero(repeats).tolist())


def oversized(scene: Scene, matching: Matching) -> tuple[int, ...]:
    """A matched object cannot be over four times as large as its own: its IoU would be below 1/4."""
    whole = scene.record.width * scene.record.height * NEARLY_ALL
    matched = {i for i, _ in matching.any_class[0]}
    true_covers = any(one.shape.box_area > whole for one in scene.true)
    result = []
    for i, nearest in _nearest(scene):
        area = scene.found[i].shape.box_area
        larger = nearest is not None and area > TOO_LARGE * scene.true[nearest].shape.box_area
        if i not in matched and (larger or (area > whole and not true_covers)):
            result.append(i)
    return tuple(result)


def _nearest(scene: Scene) -> Iterator[tuple[int, int | None]]:
    """For each predicted object the true one of largest IoU or, where none overlaps, of nearest centre."""
    if not scene.true:
        yield from ((i, None) for i in range(len(scene.found)))
        return
    found, true = (boxes_of([one.shape for one in side]) for side in (scene.found, scene.true))
    centres = [(boxes[:, :2] + boxes[:, 2:]) / 2 for boxes in (found, true)]
    for i, row in enumerate(scene.overlap):
        distance = np.square(centres[1] - centres[0][i]).sum(axis=1)
        yield i, int(row.argmax() if row.max() > 0 else distance.argmin())
