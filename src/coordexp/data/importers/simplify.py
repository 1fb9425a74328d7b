"""A ring with fewer vertices, none of the old ones further from it than a tolerance (Ramer, Douglas, Peucker).

The outline of a mask has a vertex at every step of its staircase; half a pixel or a pixel takes most of them away.
"""

import numpy as np
from numpy.typing import NDArray

from coordexp.data.importers.source import Ring, area

Points = NDArray[np.float64]


def simplified(ring: Ring, tolerance: float) -> Ring:
    """The ring itself when less than a triangle would be left of it."""
    points = np.array(ring).reshape(-1, 2)
    far = int(np.argmax(np.hypot(*(points - points[0]).T)))
    closed = np.vstack([points, points[:1]])
    kept = {0, far} | _kept(closed, 0, far, tolerance) | _kept(closed, far, len(points), tolerance)
    short = tuple(points[sorted(kept)].ravel().tolist())
    return short if len(kept) > 2 and area(short) else ring


def _kept(points: Points, first: int, last: int, tolerance: float) -> set[int]:
    """Of the vertices between two, those that a line may not skip."""
    kept: set[int] = set()
    waiting = [(first, last)]
    while waiting:
        start, end = waiting.pop()
        if end - start < 2:
            continue
        distances = _distances(points[start + 1 : end], points[start], points[end])
        worst = int(np.argmax(distances))
        if distances[worst] > tolerance:
            middle = start + 1 + worst
            kept.add(middle)
            waiting += [(start, middle), (middle, end)]
    return kept


def _distances(points: Points, start: Points, end: Points) -> Points:
    """From the line between two points, not beyond its ends."""
    along = end - start
    length = float(along @ along)
    share = np.clip((points - start) @ along / length, 0, 1) if length else np.zeros(len(points))
    apart: Points = np.hypot(*(points - start - share[:, None] * along).T)
    return apart
