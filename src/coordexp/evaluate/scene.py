"""An image with its true and its predicted objects side by side, in pixels, and how much they overlap.

Here truth and answers meet, so here they are checked against each other: every image of the truth needs exactly
one answer, and every answer an image.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from coordexp.correction.candidates import Floats
from coordexp.data import Record, RecordObject
from coordexp.evaluate.answer import Answer, in_pixels
from coordexp.evaluate.predictions import HOW_NAMED, PredictionError, Truth, check_image
from coordexp.evaluate.shapes import Shape, iou


@dataclass(frozen=True, slots=True)
class Labelled:
    desc: str
    shape: Shape
    score: float | None = None  # of a predicted object


@dataclass(frozen=True, eq=False, slots=True)
class Scene:
    """`found` are the valid objects of the answer; `overlap` has a row for each, a column for each true one."""

    image_id: int
    record: Record
    answer: Answer
    true: tuple[Labelled, ...]
    found: tuple[Labelled, ...]
    overlap: Floats


def build_scenes(truth: Truth, answers: Sequence[Answer]) -> list[Scene]:
    """In the order of the truth."""
    by_id = {answer.image_id: answer for answer in answers}
    _check_ids(truth, answers)
    return [_scene(image_id, record, by_id[image_id]) for image_id, record in truth]


def _check_ids(truth: Truth, answers: Sequence[Answer]) -> None:
    asked, answered = [image_id for image_id, _ in truth], [answer.image_id for answer in answers]
    for name, ids in (("truth", asked), ("answers", answered)):
        if twice := sorted(id for id, count in Counter(ids).items() if count > 1):
            raise PredictionError(f"{_some(twice)} more than once in the {name}\n  give every image once")
    if unknown := sorted(set(answered) - set(asked)):
        raise PredictionError(
            f"{_some(unknown)} not in the data\n  {HOW_NAMED}; give the file that was predicted on"
        )
    if missing := sorted(set(asked) - set(answered)):
        raise PredictionError(
            f"{_some(missing)} without an answer\n"
            "  predict all images, or evaluate the answered ones alone (--answered-only)"
        )


def _some(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:5])) + (", ..." if len(ids) > 5 else "")
    return f"{len(ids)} image_id{'s' if len(ids) > 1 else ''} ({shown})"


def _scene(image_id: int, record: Record, answer: Answer) -> Scene:
    check_image(answer, record)
    true = tuple(_true(image_id, k, record, found) for k, found in enumerate(record.objects))
    found = []
    for one in answer.valid:
        assert one.desc is not None and one.kind is not None and one.bins is not None
        found.append(Labelled(one.desc, Shape(one.kind, in_pixels(one.bins, record)), one.score))
    overlap = iou([one.shape for one in found], [one.shape for one in true], record.width, record.height)
    return Scene(image_id, record, answer, true, tuple(found), overlap)


def _true(image_id: int, index: int, record: Record, found: RecordObject) -> Labelled:
    coords = record.in_pixels(found)
    shape = Shape(found.kind, coords)
    upright = found.kind == "poly" or (coords[0] < coords[2] and coords[1] < coords[3])
    if not upright or shape.box_area == 0:
        raise PredictionError(
            f"image_id {image_id}: true objects[{index}] {found.kind} {list(found.coords)} has no area\n"
            "  correct the data, or drop the object (`coordexp data doctor` lists all such lines)"
        )
    return Labelled(found.desc, shape)
