"""The result of reading a source: images and their objects, in pixels, and counts of what was left out.

`Rules` are the choices of the user. A `DataError` stops an import; what can be left out or corrected without
guessing is counted instead.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from coordexp.errors import DataError, explain
from coordexp.files import is_encodable

Ring = tuple[float, ...]
Box = tuple[float, float, float, float]
SizeOf = Callable[[Path], tuple[int, int]]
"""A function that returns the width and height of an image file, or raises OSError if it cannot be read."""
Effect = Literal["dropped", "changed", "noted"]
EFFECTS: tuple[Effect, ...] = ("dropped", "changed", "noted")
LARGEST = 1e9  # no image is that large; excludes NaN and infinity too


@dataclass(frozen=True)
class Rules:
    """The user's choices where a source allows more than one result: the options of `coordexp data import`."""

    geometry: Literal["auto", "poly", "box"] = "auto"
    multipart: Literal["largest", "box", "split", "drop"] = "largest"
    crowd: Literal["drop", "keep"] = "drop"
    empty: Literal["keep", "drop"] = "keep"
    missing: Literal["refuse", "keep", "drop"] = (
        "refuse"  # refuse: if more than half of the image files are missing
    )
    outside: Literal["clip", "drop", "refuse"] = "clip"
    tolerance: float = 0.0  # pixels by which a polygon may move to save vertices
    ask: Literal["all", "classes"] = "all"  # classes: each record asks for the classes of its objects


@dataclass(frozen=True, slots=True)
class SourceObject:
    """An object of a source. `where` names its place for the user; `box` is x1, y1, x2, y2."""

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
    exhaustive: tuple[str, ...] | None = None  # the classes of which every object is labelled; None: all
    request: Mapping[str, Any] = field(default_factory=dict)  # what the record asks for, by its key of a `Record`


@dataclass(frozen=True, slots=True)
class ReasonCount:
    effect: Effect
    reason: str
    count: int
    first: str  # the place of the first case, for the user to look at


class ImportCounts:
    """How much an import wrote, and how often something was dropped, changed or noted, by reason."""

    def __init__(self) -> None:
        self.images = 0
        self.objects = 0
        self.missing = 0  # image files that do not exist
        self.first_missing = ""
        self._counts: dict[tuple[Effect, str], int] = {}
        self._firsts: dict[tuple[Effect, str], str] = {}

    def add(self, effect: Effect, reason: str, where: str) -> None:
        self._counts[effect, reason] = self._counts.get((effect, reason), 0) + 1
        self._firsts.setdefault((effect, reason), where)

    @property
    def entries(self) -> tuple[ReasonCount, ...]:
        """All counts: dropped before changed before noted, and the most frequent reason first."""
        keys = sorted(self._counts, key=self._rank)
        return tuple(ReasonCount(*key, self._counts[key], self._firsts[key]) for key in keys)

    def _rank(self, key: tuple[Effect, str]) -> tuple[int, int, str]:
        return EFFECTS.index(key[0]), -self._counts[key], key[1]


def resolve_image(folder: Path, name: Any, where: str, counts: ImportCounts) -> Path:
    """Return the path of the file `name` in `folder`. Raise DataError if it would be outside the folder."""
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise DataError(f"{where}: {name!r} is not a file name", "correct the file name in the source")
    if "\\" in name:
        counts.add("changed", "backslashes in a file name read as folders", where)
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or re.match("[A-Za-z]:", name):
        raise DataError(
            f"{where}: the file name {name!r} leads out of the folder of images",
            "write it relative to that folder, without `..`, and give the folder with --images",
        )
    return folder / path


def read_missing_size(
    path: Path, problem: str, where: str, counts: ImportCounts, size_of: SizeOf
) -> tuple[int, int]:
    """Return the size of an image whose source does not state it. Raise DataError if the file cannot be read."""
    fix = "give the folder of the images with --images, or add the sizes to the source"
    with explain(OSError, f"{problem}, and {path} cannot be read", fix):
        size = size_of(path)
    counts.add("changed", "image without width and height: read from its file", where)
    return size


def check_name(value: Any, where: str) -> str:
    """Return the name of a class. Raise DataError if it cannot be the `desc` of an object."""
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{where}: {value!r} is not a name", "give every class a text as its name; quote it if it is a number"
        )
    if not is_encodable(value):
        raise DataError(f"{where}: {value!r} contains half a character (a lone surrogate)", "correct the name")
    return value


def read_numbers(value: Any) -> Ring | None:
    """Return the numbers of a list, or None if the value is anything but a list of finite numbers."""
    if not isinstance(value, list) or not all(type(v) in (int, float) and abs(v) < LARGEST for v in value):
        return None
    return tuple(map(float, value))


def ring_area(ring: Ring) -> float:
    """Return the signed area, which is positive for a ring that runs clockwise on the screen."""
    xs, ys = ring[::2], ring[1::2]
    edges = zip(xs, ys, (*xs[1:], xs[0]), (*ys[1:], ys[0]), strict=True)
    return math.fsum(x * next_y - next_x * y for x, y, next_x, next_y in edges) / 2


def bounding_box(rings: Sequence[Ring]) -> Box:
    xs = [x for ring in rings for x in ring[::2]]
    ys = [y for ring in rings for y in ring[1::2]]
    return min(xs), min(ys), max(xs), max(ys)
