"""Records on disk: one JSON object a line, with the space of its coordinates stated and never guessed.

    {"image": "images/7.png", "width": 640, "height": 480, "space": "pixel",
     "objects": [{"desc": "red cup", "bbox_2d": [10, 20, 110, 220]}, {"desc": "leaf", "poly": [1, 2, 9, 4, 5, 9]}]}

A record may have the `image_id` and an object the `category_id` that a COCO file gave it: training does not use
them, and predictions carry them, so that COCO tools find the same images and classes.

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
KEYS = {"image", "width", "height", "space", "objects"}
LARGEST_ID = 2**63  # ids are 64-bit numbers in COCO's tools
LARGEST = 1e12  # beyond any coordinate; keeps infinity, NaN and whole numbers that no float can hold away


class RecordError(DataError):
    """A line that cannot be used as it stands."""


@dataclass(frozen=True, slots=True)
class RecordObject:
    """An object as the file has it: coordinates in the space of its record."""

    desc: str
    kind: GeometryKind
    coords: tuple[float, ...]
    category_id: int | None = None


@dataclass(frozen=True, slots=True)
class Record:
    image: str
    width: int
    height: int
    space: Space
    objects: tuple[RecordObject, ...]
    image_id: int | None = None

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
        objects = [
            {"desc": found.desc, found.kind: [_short(v) for v in found.coords]}
            | ({} if found.category_id is None else {"category_id": found.category_id})
            for found in self.objects
        ]
        named = {} if self.image_id is None else {"image_id": self.image_id}
        head = {"image": self.image, "width": self.width, "height": self.height, "space": self.space}
        return json.dumps(head | named | {"objects": objects}, ensure_ascii=False)


def parse_record(line: str | bytes) -> Record:
    """ValueError says what is wrong with the line."""
    try:
        value = json.loads(line, object_pairs_hook=_without_repeats)
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("a record is a JSON object")
    unknown = sorted(set(value) - KEYS - {"image_id"})
    missing = sorted(KEYS - set(value))
    if unknown or missing:
        raise ValueError(
            "; ".join(
                f"{what} {', '.join(map(_shown, k))}"
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
    image_id = _id(value, "image_id", "image_id")
    found = tuple(_object(each, k) for k, each in enumerate(objects))
    return Record(image, width, height, space, found, image_id)


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
        """Return a record with the number that names its image in predictions: its `image_id`, or else the number
        of its line."""
        record = self[index]
        return int(self._numbers[index]) if record.image_id is None else record.image_id, record

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
    if set(value) - {"category_id"} != {"desc", *kinds} or len(kinds) != 1:
        raise ValueError(
            f"{where} has the keys {', '.join(map(_shown, sorted(value)))}; "
            f"it needs desc and one of {', '.join(KINDS)}, and may have a category_id"
        )
    desc, coords = value["desc"], value[kinds[0]]
    if not isinstance(desc, str) or not desc.strip():
        raise ValueError(f"{where}.desc is not a text")
    numbers = isinstance(coords, list) and all(type(v) in (int, float) and abs(v) < LARGEST for v in coords)
    if not numbers:
        raise ValueError(f"{where}.{kinds[0]} is not a list of numbers")
    if not count_fits(kinds[0], len(coords)):
        raise ValueError(f"{where}.{kinds[0]} has {len(coords)} numbers; {COUNT_RULE}")
    category_id = _id(value, "category_id", f"{where}.category_id")
    return RecordObject(desc, kinds[0], tuple(map(float, coords)), category_id)


def _id(value: dict[str, Any], key: str, where: str) -> int | None:
    found = value.get(key)
    if key in value and (type(found) is not int or not 0 <= found < LARGEST_ID):
        raise ValueError(f"{where} {found!r} is not a whole number from 0")
    return found


def _shown(key: str) -> str:
    return key if key.isprintable() else repr(key)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. ValueError for a key that is there twice: JSON would keep the last."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return value


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
