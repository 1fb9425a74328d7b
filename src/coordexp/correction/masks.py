"""Mask IoU on a square canvas (D16): shapes as polygons, scaled by R / 1000, in half-open pixels, as RLE."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as rle

from coordexp.data import BINS, Geometry


def rasterise(shapes: Sequence[Geometry], resolution: int) -> list[Any]:
    """Run-length masks of the shapes; a box goes the way of its four corners."""
    scale = resolution / BINS
    rings = [_ring(shape, scale) for shape in shapes]
    return list(rle.frPyObjects(rings, resolution, resolution)) if rings else []


def mask_iou(left: list[Any], right: list[Any]) -> NDArray[np.float64]:
    """IoU of each of `left` with each of `right`."""
    if not left or not right:
        return np.zeros((len(left), len(right)))
    return np.array(rle.iou(left, right, [0] * len(right)), dtype=np.float64)


def is_empty(masks: list[Any], resolution: int) -> NDArray[np.bool_]:
    """By their encoding; pycocotools' own `area` fails on more than 255 masks."""
    nothing = _nothing(resolution)
    return np.array([mask["counts"] == nothing for mask in masks], dtype=bool)


@cache
def _nothing(resolution: int) -> Any:
    return rle.encode(np.zeros((resolution, resolution), dtype=np.uint8, order="F"))["counts"]


def _ring(shape: Geometry, scale: float) -> list[float]:
    if shape.kind == "poly":
        return [bin * scale for bin in shape.bins]
    x1, y1, x2, y2 = [bin * scale for bin in shape.bins]
    return [x1, y1, x2, y1, x2, y2, x1, y2]
