"""The result of reading a source: images and their objects, in pixels, and counts of what was left out.

`Rules` are the choices of the user. A `DataError` stops an import; what can be left out or corrected without
guessing is counted instead.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeGuard, cast

from coordexp.data.addresses import ImageError
from coordexp.data.images import read_image_size
from coordexp.errors import DataError, explain, need_packages
from coordexp.files import is_encodable, read_file

Ring = tuple[float, ...]
Box = tuple[float, float, float, float]
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
    boxes: Literal["xywh", "xyxy"] | None = None  # what the numbers of a box are; None: the source has to state it


@dataclass(frozen=True, slots=True)
class SourceObject:
    """An object of a source. `where` names its place for the user; `box` is x1, y1, x2, y2."""

    desc: str
    where: str
    box: Box | None
    rings: tuple[Ring, ...] = ()
    category_id: int | None = None
    meta: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SourceImage:
    """An image of a source: the path of its file, or its address as a str (`coordexp.data.addresses`)."""

    path: Path | str
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


class Dropped(Exception):
    """Something of a source cannot be used, for this reason. `ImportCounts.dropping` counts it."""


class ImportCounts:
    """How much an import wrote, and how often something was dropped, changed or noted, by reason."""

    def __init__(self) -> None:
        self.images = 0
        self.objects = 0
        self.missing = 0  # image files that do not exist
        self.first_missing = ""
        self._counts: Counter[tuple[Effect, str]] = Counter()
        self._firsts: dict[tuple[Effect, str], str] = {}

    def add(self, effect: Effect, reason: str, where: str, count: int = 1) -> None:
        self._counts[effect, reason] += count
        self._firsts.setdefault((effect, reason), where)

    @contextmanager
    def dropping(self, where: str) -> Iterator[None]:
        """Count a `Dropped` or an image that cannot be read in the block, and go on behind it."""
        try:
            yield
        except Dropped as reason:
            self.add("dropped", str(reason), where)
        except ImageError:
            self.add("dropped", "image that cannot be read", where)

    def as_dict(self) -> dict[str, int]:
        """Return all counts by name, for the manifest of a shard."""
        reasons = {f"{entry.effect}: {entry.reason}": entry.count for entry in self.entries}
        return {"images": self.images, "objects": self.objects} | reasons

    def add_dict(self, counts: Mapping[str, int], where: str) -> None:
        """Add the counts of a shard, which `as_dict` returned."""
        for name, count in counts.items():
            effect, _, reason = name.partition(": ")
            if name in ("images", "objects"):
                setattr(self, name, getattr(self, name) + count)
            else:
                self.add(cast(Effect, effect), reason, where, count)

    @property
    def entries(self) -> tuple[ReasonCount, ...]:
        """All counts: dropped before changed before noted, and the most frequent reason first."""
        ranked = sorted(
            self._counts.items(), key=lambda entry: (EFFECTS.index(entry[0][0]), -entry[1], entry[0][1])
        )
        return tuple(ReasonCount(*key, count, self._firsts[key]) for key, count in ranked)


def read_json(path: Path, fix: str) -> Any:
    with explain((OSError, ValueError, RecursionError), f"{path}: not a JSON document", fix):
        return json.loads(read_file(path))


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


def read_size(
    stated: Iterable[tuple[Any, Any]], path: Path, problem: str, where: str, counts: ImportCounts
) -> tuple[int, int]:
    """Return the first stated width and height that can be used, or else the size of the image file. Raise
    DataError if the file cannot be read either."""
    for sides in stated:
        if all(type(side) in (int, float) and side > 0 and side % 1 == 0 for side in sides):
            return int(sides[0]), int(sides[1])
    fix = "give the folder of the images with --images, or add the sizes to the source"
    need_packages("the size of an image", "PIL", extra="evaluate")
    with explain(OSError, f"{problem}, and {path} cannot be read", fix):
        size = read_image_size(path)
    counts.add("changed", "image without width and height: read from its file", where)
    return size


def is_name(value: Any) -> TypeGuard[str]:
    """Return True if a value can be the `desc` of an object. Half of a character (a lone surrogate) cannot."""
    return isinstance(value, str) and bool(value.strip()) and is_encodable(value)


def check_name(value: Any, where: str) -> str:
    """Return the name of a class. Raise DataError if it cannot be the `desc` of an object."""
    if not is_name(value):
        fix = "give every class a text as its name, without half characters; quote it if it is a number"
        raise DataError(f"{where}: {value!r} is not a name", fix)
    return value


def read_numbers(value: Any) -> Ring | None:
    """Return the numbers of a list, or None if the value is anything but a list of finite numbers."""
    if not isinstance(value, list) or not all(type(v) in (int, float) and abs(v) < LARGEST for v in value):
        return None
    return tuple(map(float, value))


def read_points(value: Any) -> Ring | None:
    """Return the ring of a list of points, or None if the value is anything but a list of pairs of numbers."""
    pairs = [read_numbers(point) for point in value] if isinstance(value, list) else [None]
    ring = tuple(number for pair in pairs if pair is not None and len(pair) == 2 for number in pair)
    return ring if len(ring) == 2 * len(pairs) else None


def bounding_box(rings: Sequence[Ring]) -> Box:
    xs = [x for ring in rings for x in ring[::2]]
    ys = [y for ring in rings for y in ring[1::2]]
    return min(xs), min(ys), max(xs), max(ys)
