"""Which predicted object is which true one: gated mask IoU, then the cheapest assignment with dummies.

Leaving a predicted object unmatched costs `fp_cost`, a true one `fn_cost`, a pair `1 - IoU`; a pair below the gate
is impossible. The result depends on shapes only: true objects are put into an order of their own first, so that
neither their order in the file nor their `desc` decides a tie. Of equal shapes the first in the file is taken.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from coordexp.config.rollout import RolloutMatching
from coordexp.correction.candidates import Floats, box_iou, boxes_of, candidates
from coordexp.correction.masks import is_empty, mask_iou, rasterise
from coordexp.data import Geometry

SMALL = 10_000  # pairs up to which looking for groups costs more than it saves


@dataclass(frozen=True, eq=False)
class MatchResult:
    """Indices into the predicted and the true shapes. `iou` is NaN where a pair was no candidate."""

    pairs: tuple[tuple[int, int], ...]
    missed: tuple[int, ...]
    extra: tuple[int, ...]
    gate_rejections: int  # candidates that overlap, but less than the gate asks
    iou: Floats


def match_objects(
    predicted: Sequence[Geometry], true: Sequence[Geometry], settings: RolloutMatching
) -> MatchResult:
    order = sorted(range(len(true)), key=lambda j: (true[j].bins, true[j].kind))
    iou = _candidate_iou(predicted, [true[j] for j in order], settings)
    feasible = iou >= settings.maskiou_gate  # NaN is not
    found = assign(iou, feasible, settings.fp_cost + settings.fn_cost)
    pairs = tuple([(i, order[j]) for i, j in found])
    matched_predicted, matched_true = {i for i, _ in pairs}, {j for _, j in pairs}
    return MatchResult(
        pairs,
        tuple([j for j in range(len(true)) if j not in matched_true]),
        tuple([i for i in range(len(predicted)) if i not in matched_predicted]),
        int(np.count_nonzero((iou > 0) & (iou < settings.maskiou_gate))),
        iou[:, np.argsort(order)] if order else iou,
    )


def assign(iou: Floats, feasible: NDArray[np.bool_], unmatched_cost: float) -> list[tuple[int, int]]:
    """The feasible pairs of least total cost, when two unmatched objects cost `unmatched_cost` together.

    With dummies, a pair changes the total by `1 - iou - unmatched_cost` and is worth having when that is negative.
    So the dummies need no rows of their own: what gains nothing is no pair. Objects that share no possible pair do
    not influence each other, so in a large scene each connected group is solved by itself.
    """
    gain = np.where(feasible, np.minimum(1.0 - iou - unmatched_cost, 0.0), 0.0)
    if gain.size <= SMALL:
        return _solve(gain)
    rows, columns = np.nonzero(gain)
    n, m = iou.shape
    links = coo_array((np.ones(len(rows), dtype=np.int8), (rows, columns + n)), shape=(n + m, n + m))
    _, group_of = connected_components(links, directed=False)
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, column, group in zip(rows.tolist(), columns.tolist(), group_of[rows].tolist(), strict=True):
        groups[group].append((row, column))
    return sorted(pair for links in groups.values() for pair in _solve_group(links, gain))


def _solve(gain: Floats) -> list[tuple[int, int]]:
    rows, columns = linear_sum_assignment(gain)
    useful = gain[rows, columns] < 0
    return list(zip(rows[useful].tolist(), columns[useful].tolist(), strict=True))


def _solve_group(links: list[tuple[int, int]], gain: Floats) -> list[tuple[int, int]]:
    if len(links) == 1:
        return links
    rows, columns = (sorted(set(side)) for side in zip(*links, strict=True))
    return [(rows[i], columns[j]) for i, j in _solve(gain[np.ix_(rows, columns)])]


def _candidate_iou(predicted: Sequence[Geometry], true: Sequence[Geometry], settings: RolloutMatching) -> Floats:
    """Mask IoU of the candidates. A shape too thin to cover a pixel of the canvas is compared by its box."""
    boxes = boxes_of(predicted), boxes_of(true)
    chosen = candidates(*boxes, settings.candidate_top_k)
    masks = [rasterise(shapes, settings.maskiou_resolution) for shapes in (predicted, true)]
    empty = [is_empty(each, settings.maskiou_resolution) for each in masks]
    iou = mask_iou(*masks)
    if empty[0].any() or empty[1].any():
        iou = np.where(np.logical_or.outer(*empty), box_iou(*boxes), iou)
    return np.where(chosen, iou, np.nan)
