"""Records on disk: one JSON object per line, which states the space of its coordinates.

    {"image": "images/7.png", "width": 640, "height": 480, "space": "pixel",
     "objects": [{"desc": "red cup", "bbox_2d": [10, 20, 110, 220]}, {"desc": "leaf", "poly": [1, 2, 9, 4, 5, 9]}]}

A record may have an `image_id` and an object a `category_id`, as in the COCO file that they come from. Training
does not use them. Predictions carry them, so that COCO tools recognise the same images and classes.

Image paths are relative to the folder of the file. Files are streamed, and `RecordFile` reads any line without the
others. A line that breaks a rule is a `DataError` that names the file and the line number.
"""

import json
import os
import reprlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError, with_config
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12, and brings the package

from coordexp.data.geometry import (
    BINS,
    COUNT_RULE,
    GEOMETRY_KINDS,
    Geometry,
    GeometryKind,
    TrueObject,
    is_valid_count,
    to_bin,
)
from coordexp.data.index import open_index
from coordexp.errors import DataError, explain
from coordexp.tasks import ignore

Space = Literal["pixel", "unit", "norm1000", "bin"]
SPACES: tuple[Space, ...] = get_args(Space)
LARGEST_ID = 2**63  # ids are 64-bit numbers in COCO's tools
LARGEST = 1e12  # larger than any coordinate; excludes infinity, NaN and integers that no float can hold
SHOWN_PROBLEMS = 3  # wrong values that a message names
SHOWN_KEYS = 6  # missing or unknown keys that a message names
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")  # in a dict and in a dataclass
# Words of pydantic that a reader of JSON does not know.
_PLAIN_WORDS = {"Tuple": "List", "valid tuple": "list", "valid list": "list", " after validation": ""}


@dataclass(frozen=True, slots=True)
class RecordObject:
    """An object of a record, with its coordinates in the space of the record."""

    desc: str
    kind: GeometryKind
    coords: tuple[float, ...]
    category_id: int | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a data file: an image and its objects."""

    image: str
    width: int
    height: int
    space: Space
    objects: tuple[RecordObject, ...]
    image_id: int | None = None

    @property
    def extent(self) -> tuple[float, float]:
        """The coordinates of the right and the bottom edge, in the space of the record."""
        sizes: dict[Space, tuple[float, float]] = {
            "pixel": (self.width, self.height),
            "unit": (1.0, 1.0),
            "norm1000": (1000.0, 1000.0),
            "bin": (BINS - 1.0, BINS - 1.0),
        }
        return sizes[self.space]

    def in_pixels(self, item: RecordObject) -> tuple[float, ...]:
        width, height = self.extent
        scale = (self.width / width, self.height / height)
        return tuple(value * scale[k % 2] for k, value in enumerate(item.coords))

    def in_bins(self, item: RecordObject) -> tuple[int, ...]:
        extent = self.extent
        return tuple(to_bin(value, extent[k % 2]) for k, value in enumerate(item.coords))

    def true_objects(self) -> tuple[TrueObject, ...]:
        """Return the objects in bins, ready for matching and training. Raise ValueError if one cannot be used."""
        return tuple(TrueObject(item.desc, Geometry(item.kind, self.in_bins(item))) for item in self.objects)

    def as_json(self) -> str:
        objects = [
            {"desc": item.desc, item.kind: [_shorten(value) for value in item.coords]}
            | ({} if item.category_id is None else {"category_id": item.category_id})
            for item in self.objects
        ]
        image_id = {} if self.image_id is None else {"image_id": self.image_id}
        head = {"image": self.image, "width": self.width, "height": self.height, "space": self.space}
        return json.dumps(head | image_id | {"objects": objects}, ensure_ascii=False)


# The keys of a line, as pydantic checks them. A key that is NotRequired may be absent, but not null.
_Side = Annotated[int, Strict(), Field(gt=0)]
_Id = Annotated[int, Strict(), Field(ge=0, lt=LARGEST_ID)]
_Coordinates = list[Annotated[float, Strict(), Field(gt=-LARGEST, lt=LARGEST)]]


@with_config(ConfigDict(extra="forbid"))
class _ObjectLine(TypedDict):
    desc: Annotated[str, Strict()]
    bbox_2d: NotRequired[_Coordinates]
    poly: NotRequired[_Coordinates]
    category_id: NotRequired[_Id]


@with_config(ConfigDict(extra="forbid"))
class _RecordLine(TypedDict):
    image: Annotated[str, Strict()]
    width: _Side
    height: _Side
    space: Space
    objects: list[_ObjectLine]
    image_id: NotRequired[_Id]


_RECORD_LINE = TypeAdapter(_RecordLine)


def parse_record(line: str | bytes) -> Record:
    """Return the record of a line. Raise ValueError with what is wrong with it.

    The line is not read with pydantic's own JSON parser: that one accepts a key twice, and refuses a lone
    surrogate, which the doctor reports with a better message."""
    try:
        value = _RECORD_LINE.validate_python(json.loads(line, object_pairs_hook=_refuse_repeated_keys))
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply") from error
    except ValidationError as error:
        raise ValueError(describe_problems(error) + _object_hint(error)) from error
    if not value["image"]:
        raise ValueError("image is empty; it is the path of the image, relative to the folder of this file")
    objects = tuple(_read_object(item, f"objects[{k}]") for k, item in enumerate(value["objects"]))
    return Record(value["image"], value["width"], value["height"], value["space"], objects, value.get("image_id"))


def read_records(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield the records with their line numbers, from 1. Blank lines are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _parse_line(path, number, line)


class RecordFile:
    """Random access to the records of a file. Several threads may read at the same time. `notify` gets messages
    while a large file is read for the first time."""

    def __init__(self, path: Path, notify: Callable[[str], None] = ignore) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._index = open_index(self._file, path, notify)
        if not len(self._index):
            raise DataError(f"{path}: no records", "write one JSON object per line (see `coordexp data import`)")

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> Record:
        index = range(len(self))[index]  # an index below 0 counts from the end, and one beyond it is an IndexError
        begin, end = (int(offset) for offset in self._index.offsets[index : index + 2])
        line, _, _ = os.pread(self._file, end - begin, begin).partition(b"\n")  # blank lines may follow
        return _parse_line(self.path, self._index.line_number(index), line)

    def __reduce__(self) -> Any:
        return RecordFile, (self.path,)  # another process opens the file itself

    def __str__(self) -> str:
        return str(self.path)

    @property
    def files(self) -> "tuple[RecordFile, ...]":
        """This file. A `RecordSet` has several."""
        return (self,)

    def locate(self, index: int) -> "tuple[RecordFile, int]":
        """Return this file and the number of the record. In a `RecordSet`, both depend on the record."""
        return self, index

    @property
    def object_counts(self) -> NDArray[np.uint32]:
        """The number of objects of each record."""
        return self._index.counts

    @property
    def sha256(self) -> str:
        """The hash of the whole file."""
        return self._index.sha256

    def read_with_image_id(self, index: int) -> tuple[int, Record]:
        """Return a record with the number that names its image in predictions: its `image_id`, or else the number
        of its line."""
        record = self[index]
        return self._index.line_number(index) if record.image_id is None else record.image_id, record

    def image_path(self, record: Record) -> Path:
        return self.path.parent / record.image


def describe_problems(error: ValidationError) -> str:
    """Return in one line what is wrong with a JSON value that pydantic refused."""
    missing, unknown = list[tuple[int | str, ...]](), list[tuple[int | str, ...]]()
    others = list[ErrorDetails]()
    for problem in error.errors(include_url=False):
        if problem["type"] in _UNKNOWN_KEY:
            unknown.append(problem["loc"])
        elif _is_missing_key(problem):
            missing.append(problem["loc"])
        else:
            others.append(problem)
    parts = [
        f"{title}: {_join([_format_place(place) for place in sorted(places)], ', ', SHOWN_KEYS)}"
        for title, places in (("missing keys", missing), ("unknown keys", unknown))
        if places
    ]
    if others:
        parts.append(_join([_describe_problem(problem) for problem in others], "; ", SHOWN_PROBLEMS))
    return "; ".join(parts)


def _object_hint(error: ValidationError) -> str:
    """Return which keys an object of a record has, if one of them is missing or unknown."""
    wrong_keys = {"missing", *_UNKNOWN_KEY}
    wrong = any(problem["type"] in wrong_keys and len(problem["loc"]) == 3 for problem in error.errors())
    return "; an object has desc, one of bbox_2d and poly, and may have category_id" if wrong else ""


def _is_missing_key(problem: ErrorDetails) -> bool:
    """Return True if a key is missing, and not an element of a list that is too short."""
    return problem["type"] == "missing" and isinstance(problem["loc"][-1], str)


def _join(texts: Sequence[str], separator: str, most: int) -> str:
    more = len(texts) - most
    return separator.join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def _describe_problem(problem: ErrorDetails) -> str:
    place = _format_place(problem["loc"])
    if problem["type"] in ("dict_type", "dataclass_type"):
        return f"{place or 'this'} is not a JSON object"
    if problem["type"] == "value_error":  # raised by a class of this package
        return f"{place}: {problem['ctx']['error']}"
    if problem["type"] == "missing":
        return f"{_format_place(problem['loc'][:-1])} {reprlib.repr(problem['input'])}: it has too few items"
    rule = problem["msg"]
    for words, plain_words in _PLAIN_WORDS.items():
        rule = rule.replace(words, plain_words)
    return f"{place} {reprlib.repr(problem['input'])}: {rule[0].lower()}{rule[1:]}"


def _format_place(location: tuple[int | str, ...]) -> str:
    text = ""
    for step in location:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f"{'.' if text else ''}{step if step.isprintable() else repr(step)}"
    return text


def _parse_line(path: Path, number: int, line: bytes) -> Record:
    with explain(ValueError, f"{path}:{number}", f"run `coordexp data doctor {path}`"):
        return parse_record(line)


def _read_object(line: _ObjectLine, place: str) -> RecordObject:
    kinds = [kind for kind in GEOMETRY_KINDS if kind in line]
    if len(kinds) != 1:
        shapes = " and ".join(kinds) or "no shape"
        raise ValueError(f"{place} has {shapes}; it needs exactly one of {', '.join(GEOMETRY_KINDS)}")
    if not line["desc"].strip():
        raise ValueError(f"{place}.desc is empty; describe the object in a word or two")
    coords = line[kinds[0]]
    if not is_valid_count(kinds[0], len(coords)):
        raise ValueError(f"{place}.{kinds[0]} has {len(coords)} numbers; {COUNT_RULE}")
    return RecordObject(line["desc"], kinds[0], tuple(coords), line.get("category_id"))


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raise ValueError for a key that occurs twice, of which JSON keeps the
    last."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return value


def _shorten(value: float) -> float | int:
    return int(value) if value == int(value) else value
