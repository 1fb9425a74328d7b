"""A picture and the objects in it, with geometry in bins."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from coordexp.data.coordinates import BINS
from coordexp.text import encodable

GeometryKind = Literal["bbox_2d", "poly"]


class Geometry(NamedTuple):
    """`bbox_2d`: x1, y1, x2, y2. `poly`: x, y of each vertex of one ring, at least three. All in bins."""

    kind: GeometryKind
    bins: tuple[int, ...]

    @property
    def points(self) -> tuple[tuple[int, int], ...]:
        """The vertices; of a box its corners, from the top left, clockwise."""
        if self.kind == "poly":
            return tuple(zip(self.bins[::2], self.bins[1::2], strict=True))
        x1, y1, x2, y2 = self.bins
        return ((x1, y1), (x2, y1), (x2, y2), (x1, y2))


COUNT_RULE = "a box has 4, a polygon an even number from 6"


def count_fits(kind: GeometryKind, count: int) -> bool:
    """Whether a shape of this kind can have so many coordinates."""
    return count == 4 if kind == "bbox_2d" else count >= 6 and count % 2 == 0


def degenerate(kind: GeometryKind, bins: tuple[float, ...]) -> bool:
    """Whether the shape has no inside: a box inverted or flat, a ring whose signed area is zero."""
    if kind == "bbox_2d":
        x1, y1, x2, y2 = bins
        return x1 >= x2 or y1 >= y2
    xs, ys = bins[::2], bins[1::2]
    ahead = zip(xs, ys, (*xs[1:], xs[0]), (*ys[1:], ys[0]), strict=True)
    return sum(x * next_y - next_x * y for x, y, next_x, next_y in ahead) == 0


@dataclass(frozen=True, slots=True)
class TrueObject:
    desc: str
    geometry: Geometry

    def __post_init__(self) -> None:
        kind, bins = self.geometry.kind, self.geometry.bins
        if not count_fits(kind, len(bins)):
            raise ValueError(f"{kind} has {len(bins)} coordinates; {COUNT_RULE}")
        if not all(0 <= bin < BINS for bin in bins):
            raise ValueError(f"{kind} {bins} leaves the bins 0 to {BINS - 1}; quantise with coordexp.data.to_bin")
        if degenerate(kind, bins):
            raise ValueError(
                f"{kind} {bins} has no area, or its corners are in the wrong order; correct the record"
            )
        if not encodable(self.desc):
            raise ValueError(f"desc {self.desc!r} holds half a character (a lone surrogate); correct the data")
        if not self.desc.strip():
            raise ValueError("desc is empty; every object needs a description")


@dataclass(frozen=True, slots=True)
class Sample:
    image: str
    width: int
    height: int
    objects: tuple[TrueObject, ...]
