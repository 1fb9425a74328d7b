"""Compare the true and the predicted objects of each image, in pixels.

Ground truth and answers meet here, so they are checked against each other here: every image of the ground truth
needs exactly one answer, and every answer an image.

The overlap of two boxes is that of the boxes. If at least one of the two is a polygon, both are compared as masks:
run lengths on the canvas of the image. A polygon too thin to cover a pixel is compared by its box.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pycocotools import mask as rle

from coordexp.answers.match import Floats, box_iou, mask_iou
from coordexp.data import GeometryKind, Record, RecordObject
from coordexp.data.geometry import box_ring
from coordexp.data.masks import decode_mask
from coordexp.errors import DataError, explain
from coordexp.evaluate.answer import NO_TEXT, Detection, ImageAnswer, bins_to_pixels
from coordexp.evaluate.predictions import NAMING_RULE, Truth, category_ids, check_same_image


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape in pixels, as in `Geometry`: x1, y1, x2, y2 of a box, or x and y of each vertex of a polygon. A
    shape that no single polygon describes has a `mask` as run lengths; its `coords` are the corners of its box.
    Another detector may state a box that is not the one around its polygon."""

    kind: GeometryKind
    coords: tuple[float, ...]
    mask: dict[str, Any] | None = None
    stated_box: tuple[float, float, float, float] | None = None

    @property
    def box(self) -> tuple[float, float, float, float]:
        if self.stated_box is not None:
            return self.stated_box
        xs, ys = self.coords[::2], self.coords[1::2]
        return min(xs), min(ys), max(xs), max(ys)

    @property
    def ring(self) -> tuple[float, ...]:
        """The vertices of a polygon, or the corners of a box, clockwise from the top left."""
        return self.coords if self.kind == "poly" else box_ring(self.coords)

    @property
    def box_area(self) -> float:
        x1, y1, x2, y2 = self.box
        return (x2 - x1) * (y2 - y1)


@dataclass(frozen=True, slots=True)
class LabelledShape:
    desc: str
    shape: Shape
    score: float | None = None  # of a predicted object


@dataclass(frozen=True, eq=False, slots=True)
class ImageComparison:
    """An image with the true objects that its record asks for, and the valid objects of its answer. `overlap` is
    their IoU, with a row for each predicted object and a column for each true one."""

    image_id: int
    record: Record
    answer: ImageAnswer
    true: tuple[LabelledShape, ...]
    predicted: tuple[LabelledShape, ...]
    overlap: Floats

    @property
    def refused(self) -> int:
        """The number of objects of the answer that are not valid."""
        return sum(item.reason is not None for item in self.answer.objects)


def compare_images(truth: Truth, answers: Sequence[ImageAnswer]) -> list[ImageComparison]:
    """Return one comparison per image, in the order of the ground truth. Raise DataError if the answers are not
    about the same images."""
    _check_ids(truth, answers)
    by_id = {answer.image_id: answer for answer in answers}
    comparisons = []
    for image_id, record in truth:
        check_same_image(by_id[image_id], record)
        predicted = []
        for item in by_id[image_id].valid:
            assert item.desc is not None and item.kind is not None and item.bins is not None
            shape = Shape(item.kind, bins_to_pixels(item.bins, record))
            predicted.append(LabelledShape(item.desc, shape, item.score))
        comparisons.append(_compare_image(record, by_id[image_id], predicted))
    return comparisons


def compare_results(truth: Truth, results: Sequence[Detection]) -> list[ImageComparison]:
    """Return one comparison per image with the detections of another detector. An image without detections is one
    in which it found nothing. Raise DataError if a detection is about another image."""
    records, descs = dict(truth), {number: desc for desc, number in category_ids(truth).items()}
    by_image: dict[int, list[LabelledShape]] = {image_id: [] for image_id in records}
    if unknown := sorted({result.image_id for result in results} - by_image.keys()):
        raise DataError(
            f"{_format_ids(unknown)} of the detections not in the data",
            f"give the data they are about; {NAMING_RULE}",
        )
    for result in results:
        record = records[result.image_id]
        desc = descs.get(result.category_id, f"category {result.category_id}")
        if record.classes is None or desc in record.classes:  # the others are not asked for
            shape = _to_shape(result, record)
            by_image[result.image_id].append(LabelledShape(desc, shape, result.score))
    return [
        _compare_image(record, ImageAnswer(image_id, record.image, "", NO_TEXT, 0, ()), by_image[image_id])
        for image_id, record in truth
    ]


def _compare_image(record: Record, answer: ImageAnswer, predicted: Sequence[LabelledShape]) -> ImageComparison:
    image_id = answer.image_id
    true = tuple(_true_shape(image_id, k, record, item) for k, item in enumerate(record.asked_objects))
    sides = [item.shape for item in predicted], [item.shape for item in true]
    overlap = iou(*sides, record.width, record.height)
    return ImageComparison(image_id, record, answer, true, tuple(predicted), overlap)


def _to_shape(result: Detection, record: Record) -> Shape:
    x, y, width, height = result.bbox
    box = (x, y, x + width, y + height)
    match result.segmentation:
        case None | []:
            return Shape("bbox_2d", box)
        case [ring]:
            return Shape("poly", tuple(ring), stated_box=box)
        case list() as rings:
            parts = rle.frPyObjects(rings, record.height, record.width)
            return Shape("poly", box_ring(box), dict(rle.merge(parts)))
        case mask:
            with explain(ValueError, f"segmentation of an object in {record.image}", "write the masks again"):
                pixels = decode_mask(mask, record.width, record.height)
            return Shape("poly", box_ring(box), dict(rle.encode(np.asfortranarray(pixels, dtype=np.uint8))))


def encode_mask(shape: Shape, width: int, height: int) -> dict[str, object]:
    """Return the pixels of a shape as run lengths."""
    if shape.mask is not None:
        return shape.mask
    (mask,) = rle.frPyObjects([list(shape.ring)], height, width)
    return dict(mask)


def mask_area(mask: dict[str, object]) -> int:
    return int(rle.area(mask))


def iou(left: Sequence[Shape], right: Sequence[Shape], width: int, height: int) -> Floats:
    """Return the IoU of all pairs, with a row for each of `left` and a column for each of `right`."""
    overlap = box_iou(stack_boxes(left), stack_boxes(right))
    polygons = [np.array([shape.kind == "poly" for shape in side], dtype=bool) for side in (left, right)]
    if not overlap.size or not (polygons[0].any() or polygons[1].any()):
        return overlap
    masks = [[encode_mask(shape, width, height) for shape in side] for side in (left, right)]
    empty = [np.array([mask_area(mask) == 0 for mask in side], dtype=bool) for side in masks]
    by_mask = np.logical_or.outer(*polygons) & ~np.logical_or.outer(*empty)
    return np.where(by_mask, mask_iou(*masks), overlap)


def stack_boxes(shapes: Sequence[Shape]) -> Floats:
    """Return the boxes of the shapes as rows."""
    return np.array([shape.box for shape in shapes], dtype=np.float64).reshape(-1, 4)


def _check_ids(truth: Truth, answers: Sequence[ImageAnswer]) -> None:
    true_ids, answered_ids = [image_id for image_id, _ in truth], [answer.image_id for answer in answers]
    for name, ids in (("ground truth", true_ids), ("answers", answered_ids)):
        if repeated := sorted(id for id, count in Counter(ids).items() if count > 1):
            raise DataError(f"{_format_ids(repeated)} more than once in the {name}", "give every image once")
    if unknown := sorted(set(answered_ids) - set(true_ids)):
        raise DataError(
            f"{_format_ids(unknown)} not in the data", f"give the file that was predicted on; {NAMING_RULE}"
        )
    if missing := sorted(set(true_ids) - set(answered_ids)):
        raise DataError(f"{_format_ids(missing)} without an answer", "predict all images of the data")


def _format_ids(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:5])) + (", ..." if len(ids) > 5 else "")
    return f"{len(ids)} image_id{'s' if len(ids) > 1 else ''} ({shown})"


def _true_shape(image_id: int, index: int, record: Record, item: RecordObject) -> LabelledShape:
    coords = record.in_pixels(item)
    shape = Shape(item.kind, coords)
    upright = item.kind == "poly" or (coords[0] < coords[2] and coords[1] < coords[3])
    if not upright or shape.box_area == 0:
        raise DataError(
            f"image_id {image_id}: true objects[{index}] {item.kind} {list(item.coords)} has no area",
            "correct the data, or drop the object (`coordexp data doctor` lists all such lines)",
        )
    return LabelledShape(item.desc, shape)
