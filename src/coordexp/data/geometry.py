"""Boxes and polygons in bins: the geometry that answers are written in and that training compares.

This is the one place where pixels become bins and bins become pixels. A coordinate is a continuous edge in
`[0, size]`; bin 0 is the first edge and bin 999 the last. A round trip moves an edge by at most half a bin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from coordexp.files import is_encodable

BINS = 1000
_LAST = BINS - 1

GeometryKind = Literal["bbox_2d", "poly"]
GEOMETRY_KINDS: tuple[GeometryKind, ...] = get_args(GeometryKind)
COUNT_RULE = "a box has 4, a polygon an even number from 6"


def to_bin(value: float, size: float) -> int:
    return min(_LAST, max(0, round(value / size * _LAST)))


def to_pixels(bin: float, size: float) -> float:
    return bin / _LAST * size


class Geometry(NamedTuple):
    """A shape in bins. A `bbox_2d` is x1, y1, x2, y2; a `poly` is x, y of each vertex of one ring, at least
    three."""

    kind: GeometryKind
    bins: tuple[int, ...]

    @property
    def points(self) -> tuple[tuple[int, int], ...]:
        """The vertices of a polygon, or the corners of a box, clockwise from the top left."""
        if self.kind == "poly":
            return tuple(zip(self.bins[::2], self.bins[1::2], strict=True))
        x1, y1, x2, y2 = self.bins
        return ((x1, y1), (x2, y1), (x2, y2), (x1, y2))


def is_valid_count(kind: GeometryKind, count: int) -> bool:
    """Return True if a shape of this kind can have this many coordinates (`COUNT_RULE`)."""
    return count == 4 if kind == "bbox_2d" else count >= 6 and count % 2 == 0


def is_degenerate(kind: GeometryKind, coords: tuple[float, ...]) -> bool:
    """Return True if the shape has no inside: an inverted or flat box, or a ring whose signed area is zero."""
    if kind == "bbox_2d":
        x1, y1, x2, y2 = coords
        return x1 >= x2 or y1 >= y2
    return ring_area(coords) == 0


def check_bins(kind: GeometryKind, bins: tuple[int, ...]) -> None:
    """Raise ValueError unless these are the bins of a shape with an inside."""
    if not is_valid_count(kind, len(bins)):
        raise ValueError(f"{kind} has {len(bins)} coordinates; {COUNT_RULE}")
    if not all(0 <= bin < BINS for bin in bins):
        raise ValueError(
            f"{kind} {bins} is outside the bins 0 to {BINS - 1}; convert it with coordexp.data.to_bin"
        )
    if is_degenerate(kind, bins):
        raise ValueError(f"{kind} {bins} has no area, or its corners are in the wrong order")


def ring_area(ring: Sequence[float]) -> float:
    """Return the signed area, which is positive for a ring that runs clockwise on the screen."""
    xs, ys = ring[::2], ring[1::2]
    edges = zip(xs, ys, (*xs[1:], xs[0]), (*ys[1:], ys[0]), strict=True)
    return math.fsum(x * next_y - next_x * y for x, y, next_x, next_y in edges) / 2


def box_ring(box: Sequence[float]) -> tuple[float, ...]:
    """Return the corners of a box, clockwise from the top left."""
    x1, y1, x2, y2 = box
    return (x1, y1, x2, y1, x2, y2, x1, y2)


@dataclass(frozen=True, slots=True)
class TrueObject:
    """An object of the ground truth, in bins. Creating one that cannot be trained on raises ValueError."""

    desc: str
    geometry: Geometry

    def __post_init__(self) -> None:
        check_bins(*self.geometry)
        if not is_encodable(self.desc):
            raise ValueError(f"desc {self.desc!r} contains half a character (a lone surrogate); correct the data")
        if not self.desc.strip():
            raise ValueError("desc is empty; every object needs a description")
