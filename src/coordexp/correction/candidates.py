"""For each predicted shape the few true ones that it may match, found by boxes alone (D17)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as rle

from coordexp.data import Geometry

Floats = NDArray[np.float64]


def boxes_of(shapes: Sequence[Geometry]) -> Floats:
    """x1, y1, x2, y2 of the box around each shape."""
    rows = [
        shape.bins
        if shape.kind == "bbox_2d"
        else (min(shape.bins[::2]), min(shape.bins[1::2]), max(shape.bins[::2]), max(shape.bins[1::2]))
        for shape in shapes
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def candidates(predicted: Floats, true: Floats, top_k: int) -> NDArray[np.bool_]:
    """A boolean matrix: the `top_k` true boxes of largest IoU, then of nearest centre, then of lowest index."""
    n, m = len(predicted), len(true)
    if top_k >= m or not n:
        return np.ones((n, m), dtype=bool)
    iou, distance = box_iou(predicted, true), _centre_distance(predicted, true)
    # One number for the first two: overlapping boxes are below 0, by IoU; the others above, by distance.
    rank = np.where(iou > 0, -iou, distance)
    last = np.partition(rank, top_k - 1, axis=1)[:, top_k - 1 : top_k]
    chosen = rank <= last
    for i in np.flatnonzero(chosen.sum(axis=1) > top_k):  # several are last alike
        best = np.lexsort((np.arange(m), distance[i], rank[i]))[:top_k]
        chosen[i] = False
        chosen[i, best] = True
    return chosen


def box_iou(left: Floats, right: Floats) -> Floats:
    """By pycocotools, whose boxes are x, y, width, height."""
    if not len(left) or not len(right):
        return np.zeros((len(left), len(right)))
    corner_and_size = [np.hstack((boxes[:, :2], boxes[:, 2:] - boxes[:, :2])) for boxes in (left, right)]
    return np.asarray(rle.iou(*corner_and_size, [0] * len(right)))


def _centre_distance(left: Floats, right: Floats) -> Floats:
    """Squared, between twice the centres."""
    x, y = (np.subtract.outer(left[:, a] + left[:, a + 2], right[:, a] + right[:, a + 2]) for a in (0, 1))
    return np.asarray(x * x + y * y)
