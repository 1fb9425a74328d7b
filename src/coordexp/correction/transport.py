"""Coordinate targets of a matched pair: the true box itself or, where a polygon takes part, vertices by transport.

For polygons the two shapes are uniform point sets, each moved to its own centre. An entropic transport plan
between them, by Sinkhorn in the log domain, says which true vertices a predicted one goes to; its target is their
mean under the plan (barycentric projection and nothing else, R28). Epsilon is relative to the smaller shape (D18):
a shape of 5 bins keeps its vertices as one of 500 does. Centring does the same for shapes that are far apart,
between which all plans would cost alike. The pairs of a rollout are solved together, each until it has converged.
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

_CHECK_EVERY = 10


def coord_targets(
    pairs: Sequence[tuple[Geometry, Geometry]], settings: OptimalTransport
) -> list[tuple[float, ...]]:
    """For each (predicted, true) pair, a target in bins for every coordinate token of the predicted shape."""
    by_transport = [k for k, (predicted, true) in enumerate(pairs) if "poly" in (predicted.kind, true.kind)]
    targets = [tuple(map(float, true.bins)) for _, true in pairs]
    problems = [(pairs[k][0].points, pairs[k][1].points) for k in by_transport]
    for k, landed in zip(by_transport, project(problems, settings), strict=True):
        targets[k] = _per_token(pairs[k][0], landed)
    return targets


def project(problems: Sequence[Problem], settings: OptimalTransport) -> list[Floats]:
    """For each (from, to) pair of point sets, where every `from` point lands on average."""
    plans = transport_plans(problems, settings)
    return [
        plan @ np.asarray(to, dtype=np.float64) / plan.sum(axis=1, keepdims=True)
        for plan, (_, to) in zip(plans, problems, strict=True)
    ]


def transport_plans(problems: Sequence[Problem], settings: OptimalTransport) -> list[Floats]:
    """Problems of about one size are solved together, so that one long polygon does not make all of them large."""
    buckets: dict[tuple[int, int], list[int]] = defaultdict(list)
    for k, (here, there) in enumerate(problems):
        buckets[len(here).bit_length(), len(there).bit_length()].append(k)
    plans: dict[int, Floats] = {}
    for members in buckets.values():
        plans |= zip(members, _solve([problems[k] for k in members], settings), strict=True)
    return [plans[k] for k in range(len(problems))]


def _solve(problems: Sequence[Problem], settings: OptimalTransport) -> list[Floats]:
    costs = [_cost(problem, settings.cost) / _epsilon(problem, settings.epsilon) for problem in problems]
    kernel = _padded([-cost for cost in costs], -np.inf)
    log_rows = _padded([np.full(cost.shape[0], -np.log(cost.shape[0])) for cost in costs], -np.inf)
    log_columns = _padded([np.full(cost.shape[1], -np.log(cost.shape[1])) for cost in costs], -np.inf)
    f, g = _sinkhorn(kernel, log_rows, log_columns, settings.max_iterations, settings.tolerance)
    plans = np.exp(kernel + f[:, :, None] + g[:, None, :])
    return [plan[: cost.shape[0], : cost.shape[1]] for plan, cost in zip(plans, costs, strict=True)]


def _cost(problem: Problem, kind: str) -> Floats:
    here, there = (_centred(points) for points in problem)
    difference = here[:, None, :] - there[None, :, :]
    cost: Floats = np.abs(difference).sum(-1) if kind == "l1" else np.sqrt(np.square(difference).sum(-1))
    return cost


def _centred(points: Points) -> Floats:
    values: Floats = np.asarray(points, dtype=np.float64)
    centre: Floats = (values.min(axis=0) + values.max(axis=0)) / 2
    return values - centre


def _epsilon(problem: Problem, relative: float) -> float:
    """In bins: a share of the longer side of the smaller shape, at least of one bin."""
    sides = [float(np.ptp(np.asarray(points), axis=0).max()) for points in problem]
    return relative * max(1.0, min(sides))


def _sinkhorn(
    kernel: Floats, log_rows: Floats, log_columns: Floats, iterations: int, tolerance: float
) -> tuple[Floats, Floats]:
    """Potentials, divided by epsilon, of every problem; those that have converged are left alone."""
    f, g = np.zeros(log_rows.shape), np.zeros(log_columns.shape)
    active = np.arange(len(kernel))
    k, rows, columns = kernel, log_rows, log_columns
    u: Floats = f
    for iteration in range(1, iterations + 1):
        v = _finite(columns - _log_sum(k + u[:, :, None], axis=1))
        u = _finite(rows - _log_sum(k + v[:, None, :], axis=2))
        if iteration % _CHECK_EVERY and iteration < iterations:
            continue
        f[active], g[active] = u, v
        reached = np.exp(k + u[:, :, None] + v[:, None, :]).sum(axis=1)
        going_on = np.abs(reached - np.exp(columns)).max(axis=1) >= tolerance
        if not going_on.any():
            break
        active, k, rows, columns, u = (part[going_on] for part in (active, k, rows, columns, u))
    return f, g


def _finite(values: Floats) -> Floats:
    """Padding has weight 0; its potential is of no consequence and must not be NaN."""
    return np.where(np.isfinite(values), values, 0.0)


def _log_sum(values: Floats, axis: int) -> Floats:
    """The logarithm of the sum of exponentials; 0 for padding, where there is nothing to sum."""
    top = values.max(axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    total: Floats = np.exp(values - top).sum(axis=axis)
    return np.where(total > 0, np.log(np.where(total > 0, total, 1.0)) + top.squeeze(axis), 0.0)


def _padded(arrays: Sequence[Floats], filling: float) -> Floats:
    shape = np.max([array.shape for array in arrays], axis=0)
    result = np.full((len(arrays), *shape), filling)
    for k, array in enumerate(arrays):
        inner: tuple[slice, ...] = tuple(slice(length) for length in array.shape)
        result[k][inner] = array
    return result


def _per_token(predicted: Geometry, landed: Floats) -> tuple[float, ...]:
    """A polygon's tokens are its vertices; a box's four tokens are each shared by two corners."""
    if predicted.kind == "poly":
        return tuple(landed.reshape(-1).tolist())
    left, right = landed[[0, 3], 0].mean(), landed[[1, 2], 0].mean()
    top, bottom = landed[[0, 1], 1].mean(), landed[[2, 3], 1].mean()
    return (float(left), float(top), float(right), float(bottom))
