"""What every format is read into: an image, and its objects with a box, rings, or both, in pixels.

`Rules` are the choices of the person who imports. A `SourceError` stops an import; what can be left out or
mended without a guess is counted instead.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from coordexp.data.importers.tally import Tally
from coordexp.errors import UserError
from coordexp.text import encodable

Ring = tuple[float, ...]
Box = tuple[float, float, float, float]
SizeOf = Callable[[Path], tuple[int, int]]
"""The width and height of an image file; OSError when it cannot be read."""


class SourceError(UserError, ValueError):
    """The source cannot be imported as it stands."""


@dataclass(frozen=True)
class Rules:
    geometry: Literal["auto", "poly", "box"] = "auto"
    multipart: Literal["largest", "box", "split", "drop"] = "largest"
    crowd: Literal["drop", "keep"] = "drop"
    empty: Literal["keep", "drop"] = "keep"
    missing: Literal["refuse", "keep", "drop"] = "refuse"  # refuse: if more than half of the files are not there
    outside: Literal["clip", "drop", "refuse"] = "clip"
    tolerance: float = 0.0  # pixels by which a polygon may be moved to save vertices


@dataclass(frozen=True, slots=True)
class SourceObject:
    """`where` tells a person which one it is; a box is x1, y1, x2, y2."""

    desc: str
    where: str
    box: Box | None
    rings: tuple[Ring, ...] = ()
    category_id: int | None = None


@dataclass(frozen=True, slots=True)
class SourceImage:
    path: Path
    width: int
    height: int
    objects: tuple[SourceObject, ...]
    image_id: int | None = None


def inside(folder: Path, name: Any, where: str, tally: Tally) -> Path:
    """The file `name` of `folder`, which must not lead out of it."""
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise SourceError(f"{where}: {name!r} is not a file name\n  correct the source")
    if "\\" in name:
        tally.add("changed", "backslashes in a file name read as folders", where)
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or re.match("[A-Za-z]:", name):
        raise SourceError(
            f"{where}: the file name {name!r} leads out of the folder of images\n"
            "  write it relative to that folder, without `..`, and give the folder with --images"
        )
    return folder / path


def text_of(value: Any, where: str) -> str:
    """A name that can be the `desc` of an object."""
    if not isinstance(value, str) or not value.strip():
        raise SourceError(
            f"{where}: {value!r} is not a name\n  every class needs a text; quote it if it is a number"
        )
    if not encodable(value):
        raise SourceError(f"{where}: {value!r} holds half a character (a lone surrogate)\n  correct the name")
    return value


def numbers(value: Any) -> Ring | None:
    """The numbers of a list, or None when it is not one of finite numbers only."""
    if not isinstance(value, list) or not all(type(v) in (int, float) for v in value):
        return None
    if not all(abs(v) < 1e9 for v in value):  # no image is so large; NaN and infinity go the same way
        return None
    return tuple(map(float, value))


def area(ring: Ring) -> float:
    """Signed: above zero when the ring runs clockwise on the screen."""
    xs, ys = ring[::2], ring[1::2]
    ahead = zip(xs, ys, (*xs[1:], xs[0]), (*ys[1:], ys[0]), strict=True)
    return math.fsum(x * next_y - next_x * y for x, y, next_x, next_y in ahead) / 2


def hull(rings: Sequence[Ring]) -> Box:
    xs = [x for ring in rings for x in ring[::2]]
    ys = [y for ring in rings for y in ring[1::2]]
    return min(xs), min(ys), max(xs), max(ys)
