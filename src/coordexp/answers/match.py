"""Match predicted objects with true ones, one to one, by mask IoU.

Pairing two objects costs `1 - IoU`. Leaving a predicted object unmatched costs `fp_cost`, leaving a true one
unmatched costs `fn_cost`. A pair with an IoU below the gate is impossible. The assignment with the lowest total
cost wins. The result depends on shapes only: the true objects are sorted by shape first, so that neither their
order in the file nor their `desc` decides a tie, except between true objects of identical shape: there the first
in the file is taken. With `match_classes` other than `any`, their `desc` says which pairs are possible, too.

Masks are drawn on a square canvas of `maskiou_resolution` pixels. Only pairs that are close by their bounding
boxes (`candidate_top_k`) can match.

`find_duplicates` compares the objects of one answer with each other. `match_answer` and `find_repeats` do the same
with a parsed answer, and use names as the settings say.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as rle
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from coordexp.answers.parse import ParsedRollout
from coordexp.config.rollout import RolloutMatching
from coordexp.data import BINS, Geometry, TrueObject

Floats = NDArray[np.float64]
Names = Sequence[str]

SMALL = 10_000  # number of pairs up to which looking for groups costs more than it saves


@dataclass(frozen=True, eq=False)
class MatchResult:
    """The pairs of a match, as indices into the predicted and the true shapes, and the objects without a partner.

    `iou` has a row per predicted and a column per true shape. It is NaN where a pair was not a candidate.
    """

    pairs: tuple[tuple[int, int], ...]
    missed: tuple[int, ...]
    false_positives: tuple[int, ...]
    gate_rejections: int  # candidate pairs that overlap, but less than the gate requires
    iou: Floats


def match_answer(parsed: ParsedRollout, truth: Sequence[TrueObject], settings: RolloutMatching) -> MatchResult:
    """Match the valid objects of an answer with the true ones."""
    names = parsed.names, [true.desc for true in truth]
    return match_objects(parsed.shapes, [true.geometry for true in truth], settings, names)


def match_objects(
    predicted: Sequence[Geometry],
    true: Sequence[Geometry],
    settings: RolloutMatching,
    names: tuple[Names, Names] | None = None,
) -> MatchResult:
    """Match predicted with true shapes. Without the `names` of both, all pairs are possible."""
    order = sorted(range(len(true)), key=lambda j: (true[j].bins, true[j].kind))
    same = None
    if names is not None and settings.match_classes != "any":
        same = have_same_name(names[0], [names[1][j] for j in order])
    iou = _candidate_iou(predicted, [true[j] for j in order], settings, same)
    feasible = iou >= settings.maskiou_gate  # False for NaN
    rounds = [feasible]
    if same is not None:
        rounds = [feasible & same, feasible & ~same][: 1 if settings.match_classes == "same" else 2]
    assignment: list[tuple[int, int]] = []
    for possible in rounds:
        possible[[i for i, _ in assignment]] = False
        possible[:, [j for _, j in assignment]] = False
        assignment += assign(iou, possible, settings.fp_cost + settings.fn_cost)
    pairs = tuple([(i, order[j]) for i, j in sorted(assignment)])
    matched_predicted, matched_true = {i for i, _ in pairs}, {j for _, j in pairs}
    return MatchResult(
        pairs,
        tuple([j for j in range(len(true)) if j not in matched_true]),
        tuple([i for i in range(len(predicted)) if i not in matched_predicted]),
        int(np.count_nonzero((iou > 0) & (iou < settings.maskiou_gate))),
        iou[:, np.argsort(order)] if order else iou,
    )


def have_same_name(left: Names, right: Names) -> NDArray[np.bool_]:
    """Return whether the two names of each pair are the same text."""
    same: NDArray[np.bool_] = np.equal.outer(np.array(left, dtype=object), np.array(right, dtype=object))
    return same


def without_other_names(iou: Floats, left: Names, right: Names, settings: RolloutMatching) -> Floats:
    """Return the IoU of the pairs, but 0 where names differ, unless objects of all classes are compared."""
    return iou if settings.match_classes == "any" else np.where(have_same_name(left, right), iou, 0.0)


def assign(iou: Floats, feasible: NDArray[np.bool_], unmatched_cost: float) -> list[tuple[int, int]]:
    """Return the feasible pairs with the lowest total cost.

    `unmatched_cost` is the cost of leaving one predicted and one true object unmatched. Pairing them instead
    changes the total by `1 - iou - unmatched_cost`, so a pair is only worth having if that is negative. This
    makes dummy rows and columns for unmatched objects unnecessary. Objects that share no possible pair do not
    influence each other, so each connected group of a large scene is solved separately.
    """
    cost_change = np.where(feasible, np.minimum(1.0 - iou - unmatched_cost, 0.0), 0.0)
    if cost_change.size <= SMALL:
        return _solve(cost_change)
    rows, columns = np.nonzero(cost_change)
    n, m = iou.shape
    links = coo_array((np.ones(len(rows), dtype=np.int8), (rows, columns + n)), shape=(n + m, n + m))
    _, group_of = connected_components(links, directed=False)
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, column, group in zip(rows.tolist(), columns.tolist(), group_of[rows].tolist(), strict=True):
        groups[group].append((row, column))
    return sorted(pair for links in groups.values() for pair in _solve_group(links, cost_change))


def _solve(cost_change: Floats) -> list[tuple[int, int]]:
    rows, columns = linear_sum_assignment(cost_change)
    useful = cost_change[rows, columns] < 0
    return list(zip(rows[useful].tolist(), columns[useful].tolist(), strict=True))


def _solve_group(links: list[tuple[int, int]], cost_change: Floats) -> list[tuple[int, int]]:
    if len(links) == 1:
        return links
    rows, columns = (sorted(set(side)) for side in zip(*links, strict=True))
    return [(rows[i], columns[j]) for i, j in _solve(cost_change[np.ix_(rows, columns)])]


def _candidate_iou(
    predicted: Sequence[Geometry],
    true: Sequence[Geometry],
    settings: RolloutMatching,
    same: NDArray[np.bool_] | None,
) -> Floats:
    """Return the mask IoU of all candidate pairs, and NaN for the others. All pairs of the `same` name are
    candidates: closer objects of other names do not take their places.

    A shape that is too thin to cover a pixel of the canvas is compared by its bounding box.
    """
    boxes = bounding_boxes(predicted), bounding_boxes(true)
    chosen = choose_candidates(*boxes, settings.candidate_top_k)
    if same is not None:
        chosen |= same
    masks = [rasterise(shapes, settings.maskiou_resolution) for shapes in (predicted, true)]
    empty = [is_empty(side, settings.maskiou_resolution) for side in masks]
    iou = mask_iou(*masks)
    if empty[0].any() or empty[1].any():
        iou = np.where(np.logical_or.outer(*empty), box_iou(*boxes), iou)
    return np.where(chosen, iou, np.nan)


def bounding_boxes(shapes: Sequence[Geometry]) -> Floats:
    """Return the bounding box of each shape as a row x1, y1, x2, y2."""
    rows = [
        shape.bins
        if shape.kind == "bbox_2d"
        else (min(shape.bins[::2]), min(shape.bins[1::2]), max(shape.bins[::2]), max(shape.bins[1::2]))
        for shape in shapes
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def choose_candidates(predicted: Floats, true: Floats, top_k: int) -> NDArray[np.bool_]:
    """Return a boolean matrix with at most `top_k` candidates per predicted box.

    The candidates are the true boxes with the largest IoU, then those with the nearest centre, then those with the
    lowest index.
    """
    n, m = len(predicted), len(true)
    if top_k >= m or not n:
        return np.ones((n, m), dtype=bool)
    iou, distance = box_iou(predicted, true), _centre_distance(predicted, true)
    # A single rank for both criteria: overlapping boxes are negative, by IoU; the others positive, by distance.
    rank = np.where(iou > 0, -iou, distance)
    last = np.partition(rank, top_k - 1, axis=1)[:, top_k - 1 : top_k]
    chosen = rank <= last
    for i in np.flatnonzero(chosen.sum(axis=1) > top_k):  # several boxes tie for the last place
        best = np.lexsort((np.arange(m), distance[i], rank[i]))[:top_k]
        chosen[i] = False
        chosen[i, best] = True
    return chosen


def box_iou(left: Floats, right: Floats) -> Floats:
    """Return the IoU of every box in `left` with every box in `right`. Boxes are x1, y1, x2, y2."""
    if not len(left) or not len(right):
        return np.zeros((len(left), len(right)))
    # pycocotools expects x, y, width, height.
    corner_and_size = [np.hstack((boxes[:, :2], boxes[:, 2:] - boxes[:, :2])) for boxes in (left, right)]
    return np.asarray(rle.iou(*corner_and_size, [0] * len(right)))


def _centre_distance(left: Floats, right: Floats) -> Floats:
    """Return a measure that orders pairs of boxes by the distance of their centres: four times its square."""
    x, y = (np.subtract.outer(left[:, a] + left[:, a + 2], right[:, a] + right[:, a + 2]) for a in (0, 1))
    return np.asarray(x * x + y * y)


def rasterise(shapes: Sequence[Geometry], resolution: int) -> list[Any]:
    """Return the run-length masks of the shapes on a square canvas of `resolution` pixels.

    Boxes are drawn as polygons too, so that a box and a polygon with the same corners have the same mask. Pixels
    are half-open intervals, so that shapes side by side do not overlap.
    """
    scale = resolution / BINS
    rings = [_ring(shape, scale) for shape in shapes]
    return list(rle.frPyObjects(rings, resolution, resolution)) if rings else []


def mask_iou(left: list[Any], right: list[Any]) -> Floats:
    """Return the IoU of every mask in `left` with every mask in `right`."""
    if not left or not right:
        return np.zeros((len(left), len(right)))
    return np.array(rle.iou(left, right, [0] * len(right)), dtype=np.float64)


def is_empty(masks: list[Any], resolution: int) -> NDArray[np.bool_]:
    """Return for each mask whether it covers no pixel.

    The encodings are compared because pycocotools' own `area` fails for more than 255 masks.
    """
    empty = _empty_encoding(resolution)
    return np.array([mask["counts"] == empty for mask in masks], dtype=bool)


@cache
def _empty_encoding(resolution: int) -> Any:
    return rle.encode(np.zeros((resolution, resolution), dtype=np.uint8, order="F"))["counts"]


def _ring(shape: Geometry, scale: float) -> list[float]:
    if shape.kind == "poly":
        return [bin * scale for bin in shape.bins]
    x1, y1, x2, y2 = [bin * scale for bin in shape.bins]
    return [x1, y1, x2, y1, x2, y2, x1, y2]


def find_repeats(
    parsed: ParsedRollout, settings: RolloutMatching, certain: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the valid objects of an answer that are duplicates of earlier ones, as `find_duplicates` does."""
    names = None if settings.match_classes == "any" else parsed.names
    iou, resolution = settings.correction.duplicate_iou, settings.maskiou_resolution
    return find_duplicates(parsed.shapes, iou, resolution, certain, names)


def find_duplicates(
    shapes: Sequence[Geometry],
    iou: float,
    resolution: int = 256,
    certain: Collection[int] = (),
    names: Names | None = None,
) -> tuple[int, ...]:
    """Return the indices of the shapes that overlap an earlier shape by at least `iou`.

    A duplicate itself repeats nothing: in a chain of shapes where each overlaps only the one before, every second
    one is a duplicate. The shapes in `certain` are known to be objects of their own: they are never duplicates,
    and any other shape that overlaps one of them is, even if it is the earlier one. With `names`, only shapes of
    the same name are duplicates of each other.
    """
    if not 0 < iou <= 1:
        raise ValueError(f"an IoU of {iou}: it must be above 0 and at most 1")
    if len(shapes) < 2:
        return ()
    overlaps = pairwise_iou(shapes, resolution) >= iou
    np.fill_diagonal(overlaps, False)
    if names is not None:
        overlaps &= have_same_name(names, names)
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
