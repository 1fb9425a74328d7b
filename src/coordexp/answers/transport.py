"""Compute the coordinate targets of matched pairs. For two boxes, the target is the true box. If at least one of
the shapes is a polygon, the targets come from optimal transport between the vertices.

Each shape is a set of points of equal weight, moved so that the centre of its bounding box is the origin.
Sinkhorn's algorithm in the log domain finds an entropic transport plan between the two sets. The target of a
predicted vertex is the mean of the true vertices under that plan (the barycentric projection). Epsilon is relative
to the smaller shape, so that a shape of 5 bins keeps its vertices as well as one of 500. Shapes are centred
because all plans between two distant shapes would cost nearly the same. All pairs of a rollout are solved
together, each until it has converged, or for `MAX_ITERATIONS`: about one in a hundred pairs of unlike shapes.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coordexp.config.rollout import OptimalTransport
from coordexp.data import Geometry

Floats = NDArray[np.float64]
Points = Sequence[tuple[float, float]]
Problem = tuple[Points, Points]

MAX_ITERATIONS = 10_000
TOLERANCE = 1e-5  # a problem has converged when the error of its marginals is below this
_CHECK_EVERY = 10


def coord_targets(
    pairs: Sequence[tuple[Geometry, Geometry]], settings: OptimalTransport
) -> list[tuple[float, ...]]:
    """Return, for each (predicted, true) pair, a target in bins for every coordinate token of the predicted
    shape."""
    by_transport = [k for k, (predicted, true) in enumerate(pairs) if "poly" in (predicted.kind, true.kind)]
    targets = [tuple(map(float, true.bins)) for _, true in pairs]
    problems = [(pairs[k][0].points, pairs[k][1].points) for k in by_transport]
    for k, landed in zip(by_transport, project(problems, settings), strict=True):
        targets[k] = _per_token(pairs[k][0], landed)
    return targets


def project(problems: Sequence[Problem], settings: OptimalTransport) -> list[Floats]:
    """Return, for each (from, to) pair of point sets, the mean position to which every `from` point is moved."""
    plans = transport_plans(problems, settings)
    return [
        plan @ np.asarray(to, dtype=np.float64) / plan.sum(axis=1, keepdims=True)
        for plan, (_, to) in zip(plans, problems, strict=True)
    ]


def transport_plans(problems: Sequence[Problem], settings: OptimalTransport) -> list[Floats]:
    """Return the transport plan of each problem. Only problems of similar size are solved together, so that one
    long polygon does not make all of them large."""
    buckets: dict[tuple[int, int], list[int]] = defaultdict(list)
    for k, (here, there) in enumerate(problems):
        buckets[len(here).bit_length(), len(there).bit_length()].append(k)
    plans: dict[int, Floats] = {}
    for members in buckets.values():
        plans |= zip(members, _solve([problems[k] for k in members], settings), strict=True)
    return [plans[k] for k in range(len(problems))]


def _solve(problems: Sequence[Problem], settings: OptimalTransport) -> list[Floats]:
    costs = [_cost(problem, settings.cost) / _epsilon(problem, settings.epsilon) for problem in problems]
    kernel = _pad([-cost for cost in costs], -np.inf)
    log_rows = _pad([np.full(cost.shape[0], -np.log(cost.shape[0])) for cost in costs], -np.inf)
    log_columns = _pad([np.full(cost.shape[1], -np.log(cost.shape[1])) for cost in costs], -np.inf)
    f, g = _sinkhorn(kernel, log_rows, log_columns)
    plans = np.exp(kernel + f[:, :, None] + g[:, None, :])
    return [plan[: cost.shape[0], : cost.shape[1]] for plan, cost in zip(plans, costs, strict=True)]


def _cost(problem: Problem, kind: str) -> Floats:
    here, there = (_centre(points) for points in problem)
    difference = here[:, None, :] - there[None, :, :]
    cost: Floats = np.abs(difference).sum(-1) if kind == "l1" else np.sqrt(np.square(difference).sum(-1))
    return cost


def _centre(points: Points) -> Floats:
    values: Floats = np.asarray(points, dtype=np.float64)
    centre: Floats = (values.min(axis=0) + values.max(axis=0)) / 2
    return values - centre


def _epsilon(problem: Problem, relative: float) -> float:
    """Return epsilon in bins: `relative` times the longer side of the smaller shape, which counts as at least 1
    bin."""
    sides = [float(np.ptp(np.asarray(points), axis=0).max()) for points in problem]
    return relative * max(1.0, min(sides))


def _sinkhorn(kernel: Floats, log_rows: Floats, log_columns: Floats) -> tuple[Floats, Floats]:
    """Return the potentials of every problem, divided by epsilon. Problems that have converged take no further
    part."""
    f, g = np.zeros(log_rows.shape), np.zeros(log_columns.shape)
    active = np.arange(len(kernel))
    k, rows, columns = kernel, log_rows, log_columns
    u: Floats = f
    for iteration in range(1, MAX_ITERATIONS + 1):
        v = _finite(columns - _log_sum(k + u[:, :, None], axis=1))
        u = _finite(rows - _log_sum(k + v[:, None, :], axis=2))
        if iteration % _CHECK_EVERY and iteration < MAX_ITERATIONS:
            continue
        f[active], g[active] = u, v
        reached = np.exp(k + u[:, :, None] + v[:, None, :]).sum(axis=1)
        unfinished = np.abs(reached - np.exp(columns)).max(axis=1) >= TOLERANCE
        if not unfinished.any():
            break
        active, k, rows, columns, u = (part[unfinished] for part in (active, k, rows, columns, u))
    return f, g


def _finite(values: Floats) -> Floats:
    """Replace the potentials of padding by 0. Padding has no weight, so they do not matter, but they must not be
    NaN."""
    return np.where(np.isfinite(values), values, 0.0)


def _log_sum(values: Floats, axis: int) -> Floats:
    """Return the logarithm of the sum of exponentials, and 0 for padding, where there is nothing to sum."""
    top = values.max(axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    total: Floats = np.exp(values - top).sum(axis=axis)
    return np.where(total > 0, np.log(np.where(total > 0, total, 1.0)) + top.squeeze(axis), 0.0)


def _pad(arrays: Sequence[Floats], filling: float) -> Floats:
    shape = np.max([array.shape for array in arrays], axis=0)
    result = np.full((len(arrays), *shape), filling)
    for k, array in enumerate(arrays):
        inner: tuple[slice, ...] = tuple(slice(length) for length in array.shape)
        result[k][inner] = array
    return result


def _per_token(predicted: Geometry, landed: Floats) -> tuple[float, ...]:
    """Return a target per token. The tokens of a polygon are its vertices. Each token of a box belongs to two
    corners, and its target is the mean of theirs."""
    if predicted.kind == "poly":
        return tuple(landed.reshape(-1).tolist())
    left, right = landed[[0, 3], 0].mean(), landed[[1, 2], 0].mean()
    top, bottom = landed[[0, 1], 1].mean(), landed[[2, 3], 1].mean()
    return (float(left), float(top), float(right), float(bottom))
