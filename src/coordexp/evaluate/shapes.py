"""Shapes in pixels and how much they overlap: boxes as boxes; where a polygon takes part, both as masks.

Masks are run lengths on the canvas of the image. A polygon too thin to cover a pixel is compared by its box.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pycocotools import mask as rle

from coordexp.correction.candidates import Floats, box_iou
from coordexp.correction.masks import mask_iou
from coordexp.data import GeometryKind


@dataclass(frozen=True, slots=True)
class Shape:
    """Pixels, as in `Geometry`: x1, y1, x2, y2 of a box, x and y of each vertex of a polygon."""

    kind: GeometryKind
    coords: tuple[float, ...]

    @property
    def box(self) -> tuple[float, float, float, float]:
        xs, ys = self.coords[::2], self.coords[1::2]
        return min(xs), min(ys), max(xs), max(ys)

    @property
    def ring(self) -> tuple[float, ...]:
        """Of a box its corners, from the top left, clockwise."""
        if self.kind == "poly":
            return self.coords
        x1, y1, x2, y2 = self.coords
        return (x1, y1, x2, y1, x2, y2, x1, y2)

    @property
    def box_area(self) -> float:
        x1, y1, x2, y2 = self.box
        return (x2 - x1) * (y2 - y1)


def mask_of(shape: Shape, width: int, height: int) -> dict[str, object]:
    (mask,) = rle.frPyObjects([list(shape.ring)], height, width)
    return dict(mask)


def mask_area(mask: dict[str, object]) -> int:
    return int(rle.area(mask))


def iou(left: Sequence[Shape], right: Sequence[Shape], width: int, height: int) -> Floats:
    """A row for each of `left`, a column for each of `right`."""
    overlap = box_iou(boxes_of(left), boxes_of(right))
    polygons = [np.array([shape.kind == "poly" for shape in side], dtype=bool) for side in (left, right)]
    if not overlap.size or not (polygons[0].any() or polygons[1].any()):
        return overlap
    masks = [[mask_of(shape, width, height) for shape in side] for side in (left, right)]
    empty = [np.array([mask_area(mask) == 0 for mask in side], dtype=bool) for side in masks]
    by_mask = np.logical_or.outer(*polygons) & ~np.logical_or.outer(*empty)
    return np.where(by_mask, mask_iou(*masks), overlap)


def boxes_of(shapes: Sequence[Shape]) -> Floats:
    return np.array([shape.box for shape in shapes], dtype=np.float64).reshape(-1, 4)
