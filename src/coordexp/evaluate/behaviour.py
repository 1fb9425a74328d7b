"""How a model behaves apart from what it detects: repeated and broken objects, and where it misses objects.

Each rate has a numerator and a denominator. `DEFINITIONS` says what is counted; reports print it. "Matched" means
at IoU 0.5, with class for duplicates and without class for missed objects. Every missed object counts as
either skipped or stopped, so these two rates add up to 1 - recall of any class.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.answers.match import have_same_name
from coordexp.evaluate.comparison import ImageComparison, LabelledShape, iou
from coordexp.evaluate.matching import Matching

SAME = 0.9  # IoU from which two predictions are the same

NEED_TEXT = frozenset({"invalid", "truncated", "unreadable", "skipped", "stopped"})  # they need an answer's text
DEFINITIONS = {
    "duplicates": "unmatched objects that repeat a matched or an earlier one (same desc, IoU >= 0.9); of valid"
    " objects",
    "invalid": "objects that the parser refused; of all objects",
    "unknown_class": "objects with a desc that no true object of the data has; of valid objects",
    "truncated": "answers cut off at the token limit; of all answers",
    "unreadable": "answers that do not begin with { (native ones: with a list, an object or a markdown fence), so"
    " that nothing of them is read; of all answers",
    "skipped": "missed objects before the last object of the answer in reading order (top edge, then left edge);"
    " of true objects",
    "stopped": "missed objects behind the last object of the answer in reading order; of true objects",
    "over_count": "answers with more valid objects than true ones; of all answers",
    "boxes_on_empty": "images without a true object that got a valid one; of all such images",
    "absent_classes": "classes that were asked for, are not in the image, and got a valid object; of all classes"
    " that were asked for and are not in the image",
    "unasked": "objects of a class that was not asked for; of valid objects in answers to a list of classes",
}


@dataclass(frozen=True, slots=True)
class Rate:
    count: int
    of: int

    @property
    def value(self) -> float | None:
        """The rate, or None if there was nothing to count."""
        return self.count / self.of if self.of else None


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The rates by the names of `DEFINITIONS`, the reasons of invalid objects, and the descs that the data does
    not have, each with the most frequent first."""

    rates: dict[str, Rate]
    reasons: dict[str, int]
    unknown: dict[str, int]


def observe(comparisons: Sequence[ImageComparison], matchings: Sequence[Matching]) -> Behaviour:
    """Return the behaviour over all images."""
    reasons = Counter(
        item.reason for image in comparisons for item in image.answer.objects if item.reason is not None
    )
    classes = true_classes(comparisons)
    unknown = Counter(item.desc for image in comparisons for item in image.predicted if item.desc not in classes)
    by_image = [
        observe_image(image, matching, classes) for image, matching in zip(comparisons, matchings, strict=True)
    ]
    rates = {
        name: Rate(sum(rates[name].count for rates in by_image), sum(rates[name].of for rates in by_image))
        for name in DEFINITIONS
    }
    return Behaviour(rates, dict(reasons.most_common()), dict(unknown.most_common()))


def true_classes(comparisons: Sequence[ImageComparison]) -> frozenset[str]:
    return frozenset(item.desc for image in comparisons for item in image.true)


def observe_image(image: ImageComparison, matching: Matching, classes: frozenset[str]) -> dict[str, Rate]:
    """Return what one image adds to each rate. `classes` are those of all true objects of the data."""
    valid, true = len(image.predicted), len(image.true)
    refused = image.refused
    asked = int(image.answer.was_asked)
    answered = int(asked and image.answer.has_text)
    return {
        "duplicates": Rate(len(find_duplicates(image, matching)), valid),
        "invalid": Rate(refused, valid + refused if answered else 0),
        "unknown_class": Rate(sum(item.desc not in classes for item in image.predicted), valid),
        "truncated": Rate(int(image.answer.is_truncated), answered),
        "unreadable": Rate(int(answered and not image.answer.is_readable), answered),
        **_observe_missed(image, matching),
        "over_count": Rate(int(valid > true), asked),
        "boxes_on_empty": Rate(int(not true and valid > 0), int(not true and asked)),
        **_observe_request(image),
    }


def _observe_missed(image: ImageComparison, matching: Matching) -> dict[str, Rate]:
    """Return which missed objects are before and which behind the last object of the answer, all in reading order.
    The detections of another detector have no order of writing, so they give no rate."""
    true = len(image.true) if image.answer.has_text else 0
    matched = {j for _, j in matching.any_class[0]}
    missed = [_corner(item) for j, item in enumerate(image.true) if j not in matched] if true else []
    last = max(map(_corner, image.predicted), default=(-1.0, -1.0))
    skipped = sum(corner <= last for corner in missed)
    return {"skipped": Rate(skipped, true), "stopped": Rate(len(missed) - skipped, true)}


def _corner(item: LabelledShape) -> tuple[float, float]:
    """Return the top and the left edge of an object."""
    left, top, _, _ = item.shape.box
    return top, left


def _observe_request(image: ImageComparison) -> dict[str, Rate]:
    classes = image.record.classes if image.answer.was_asked else None
    answered = [item.desc for item in image.predicted]
    absent = set(classes or ()) - {item.desc for item in image.true}
    return {
        "absent_classes": Rate(len(absent & set(answered)), len(absent)),
        "unasked": Rate(
            sum(desc not in classes for desc in answered) if classes else 0, len(answered) if classes else 0
        ),
    }


def find_duplicates(image: ImageComparison, matching: Matching) -> tuple[int, ...]:
    """Return the predicted objects that repeat another. Of several copies, all but one are duplicates, whichever
    of them was matched."""
    shapes, descs = [item.shape for item in image.predicted], [item.desc for item in image.predicted]
    if len(set(descs)) == len(descs):
        return ()
    copies = iou(shapes, shapes, image.record.width, image.record.height) >= SAME
    copies &= have_same_name(descs, descs) & ~np.eye(len(descs), dtype=bool)
    matched = np.zeros(len(descs), dtype=bool)
    matched[[i for i, _ in matching.with_class[0]]] = True
    earlier = np.tri(len(descs), k=-1, dtype=bool)
    repeats = ~matched & (copies & (matched | earlier)).any(axis=1)
    return tuple(np.flatnonzero(repeats).tolist())
