"""Records on disk: one JSON object a line, with the space of its coordinates stated and never guessed.

    {"image": "images/7.png", "width": 640, "height": 480, "space": "pixel",
     "objects": [{"desc": "red cup", "bbox_2d": [10, 20, 110, 220]}, {"desc": "leaf", "poly": [1, 2, 9, 4, 5, 9]}]}

Image paths are relative to the folder of the file. Files stream; `RecordFile` finds any line without reading the
others. A line that breaks a rule is a `RecordError` with its file, its number and the way out.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coordexp.data.coordinates import BINS, to_bin
from coordexp.data.sample import COUNT_RULE, Geometry, GeometryKind, Sample, TrueObject, count_fits
from coordexp.errors import DataError

Space = Literal["pixel", "unit", "norm1000", "bin"]
SPACES: tuple[Space, ...] = get_args(Space)
KINDS: tuple[GeometryKind, ...] = get_args(GeometryKind)
LARGEST = 1e12  # beyond any coordinate; keeps infinity, NaN and whole numbers that no float can hold away


class RecordError(DataError):
    """A line that cannot be used as it stands."""


@dataclass(frozen=True, slots=True)
class RecordObject:
    """An object as the file has it: coordinates in the space of its record."""

    desc: str
    kind: GeometryKind
    coords: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Record:
    image: str
    width: int
    height: int
    space: Space
    objects: tuple[RecordObject, ...]

    @property
    def extent(self) -> tuple[float, float]:
        """The far edges, in the record's own space."""
        sizes: dict[Space, tuple[float, float]] = {
            "pixel": (self.width, self.height),
            "unit": (1.0, 1.0),
            "norm1000": (1000.0, 1000.0),
            "bin": (BINS - 1.0, BINS - 1.0),
        }
        return sizes[self.space]

    def in_pixels(self, found: RecordObject) -> tuple[float, ...]:
        width, height = self.extent
        scale = (self.width / width, self.height / height)
        return tuple(value * scale[k % 2] for k, value in enumerate(found.coords))

    def sample(self) -> Sample:
        """In bins, ready to be matched and trained on. ValueError for a shape that cannot be."""
        extent = self.extent
        objects = []
        for found in self.objects:
            bins = tuple(to_bin(value, extent[k % 2]) for k, value in enumerate(found.coords))
            objects.append(TrueObject(found.desc, Geometry(found.kind, bins)))
        return Sample(self.image, self.width, self.height, tuple(objects))

    def as_json(self) -> str:
        objects = [{"desc": found.desc, found.kind: [_short(v) for v in found.coords]} for found in self.objects]
        head = {"image": self.image, "width": self.width, "height": self.height, "space": self.space}
        return json.dumps(head | {"objects": objects}, ensure_ascii=False)


def parse_record(line: str | bytes) -> Record:
    """ValueError says what is wrong with the line."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("a record is a JSON object")
    unknown = sorted(set(value) - {"image", "width", "height", "space", "objects"})
    missing = sorted({"image", "width", "height", "space", "objects"} - set(value))
    if unknown or missing:
        raise ValueError(
            "; ".join(
                f"{what} {', '.join(k)}"
                for what, k in (("unknown keys:", unknown), ("missing keys:", missing))
                if k
            )
        )
    image, width, height, space, objects = (value[k] for k in ("image", "width", "height", "space", "objects"))
    if not isinstance(image, str) or not image:
        raise ValueError("image is not a path")
    if not all(type(side) is int and side > 0 for side in (width, height)):
        raise ValueError(f"width {width!r} and height {height!r} are not positive whole numbers")
    if space not in SPACES:
        raise ValueError(f"space {space!r} is not one of {', '.join(SPACES)}")
    if not isinstance(objects, list):
        raise ValueError("objects is not a list")
    return Record(image, width, height, space, tuple(_object(found, k) for k, found in enumerate(objects)))


def read_records(path: Path) -> Iterator[tuple[int, Record]]:
    """Line numbers, from 1, with their records. Blank lines are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _parsed(path, number, line)


class RecordFile:
    """Any record of a file by its index, with one offset a line in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets, self._numbers = _offsets(path)
        if not len(self._offsets):
            raise RecordError(f"{path}: no records\n  write one JSON object a line (see `coordexp data import`)")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Record:
        with self.path.open("rb") as file:
            file.seek(int(self._offsets[index]))
            return _parsed(self.path, int(self._numbers[index]), file.readline())

    def numbered(self, index: int) -> tuple[int, Record]:
        """With its line number, which names its image in predictions."""
        return int(self._numbers[index]), self[index]

    def image_path(self, record: Record) -> Path:
        return self.path.parent / record.image


def _parsed(path: Path, number: int, line: bytes) -> Record:
    try:
        return parse_record(line)
    except ValueError as error:
        raise RecordError(f"{path}:{number}: {error}\n  run `coordexp data doctor {path}`") from error


def _object(value: Any, index: int) -> RecordObject:
    where = f"objects[{index}]"
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a JSON object")
    kinds = [kind for kind in KINDS if kind in value]
    if set(value) != {"desc", *kinds} or len(kinds) != 1:
        raise ValueError(
            f"{where} has the keys {', '.join(sorted(value))}; it needs desc and one of {', '.join(KINDS)}"
        )
    desc, coords = value["desc"], value[kinds[0]]
    if not isinstance(desc, str) or not desc.strip():
        raise ValueError(f"{where}.desc is not a text")
    numbers = isinstance(coords, list) and all(type(v) in (int, float) and abs(v) < LARGEST for v in coords)
    if not numbers:
        raise ValueError(f"{where}.{kinds[0]} is not a list of numbers")
    if not count_fits(kinds[0], len(coords)):
        raise ValueError(f"{where}.{kinds[0]} has {len(coords)} numbers; {COUNT_RULE}")
    return RecordObject(desc, kinds[0], tuple(map(float, coords)))


def _short(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _offsets(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    offsets, numbers, at = [], [], 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                offsets.append(at)
                numbers.append(number)
            at += len(line)
    return np.array(offsets, dtype=np.int64), np.array(numbers, dtype=np.int64)
