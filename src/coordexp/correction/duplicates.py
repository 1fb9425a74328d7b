"""Find the objects of an answer that repeat an earlier one."""

from collections.abc import Collection, Sequence

import numpy as np

from coordexp.correction.match import Floats, bounding_boxes, box_iou, is_empty, mask_iou, rasterise
from coordexp.data import Geometry


def find_duplicates(
    shapes: Sequence[Geometry], iou: float, resolution: int = 256, certain: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the indices of the shapes that overlap an earlier shape by at least `iou`.

    A duplicate itself repeats nothing: in a chain of shapes where each overlaps only the one before, every second
    one is a duplicate. The shapes in `certain` are known to be objects of their own: they are never duplicates,
    and any other shape that overlaps one of them is, even if it is the earlier one.
    """
    if not 0 < iou <= 1:
        raise ValueError(f"an IoU of {iou}: it must be above 0 and at most 1")
    if len(shapes) < 2:
        return ()
    overlaps = pairwise_iou(shapes, resolution) >= iou
    np.fill_diagonal(overlaps, False)
    is_kept = np.isin(np.arange(len(shapes)), list(certain))
    is_duplicate = np.zeros(len(shapes), dtype=bool)
    for i in np.flatnonzero(~is_kept):  # in rising order, so all that stays before i is known
        is_duplicate[i] = (overlaps[i] & is_kept).any()
        is_kept[i] = not is_duplicate[i]
    return tuple(np.flatnonzero(is_duplicate).tolist())


def pairwise_iou(shapes: Sequence[Geometry], resolution: int) -> Floats:
    """Return the IoU of every pair of shapes. Two boxes are compared exactly. If one of the two is a polygon, both
    are drawn on a square canvas, except that a shape too thin to cover a pixel is compared by its bounding box."""
    boxes = bounding_boxes(shapes)
    iou = box_iou(boxes, boxes)
    is_polygon = np.array([shape.kind == "poly" for shape in shapes])
    close = iou > 0
    drawn = np.flatnonzero((close & is_polygon[:, None]).any(axis=0))
    if not len(drawn):
        return iou
    masks = rasterise([shapes[i] for i in drawn], resolution)
    visible = ~is_empty(masks, resolution)
    by_mask = np.logical_or.outer(is_polygon[drawn], is_polygon[drawn]) & np.logical_and.outer(visible, visible)
    square = np.ix_(drawn, drawn)
    iou[square] = np.where(by_mask, mask_iou(masks, masks), iou[square])
    return iou
