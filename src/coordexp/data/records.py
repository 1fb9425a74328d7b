"""Records on disk: one JSON object per line, which states the space of its coordinates.

    {"image": "images/7.png", "width": 640, "height": 480, "space": "pixel",
     "objects": [{"desc": "red cup", "bbox_2d": [10, 20, 110, 220]}, {"desc": "leaf", "poly": [1, 2, 9, 4, 5, 9]}]}

A record may ask a question of its own (`coordexp.data.requests`):

    "classes": ["red cup", "fork"]       find objects of these classes; other objects are not part of the answer
    "expression": "the cup on the left"  find what is described: the objects of the record
    "prompt": "Find every {classes}."    the question itself, in which {classes} stands for the classes

"exhaustive": ["red cup", "fork"] are the classes of which every object is labelled. Without it, these are all
classes of the data. Negatives are drawn from them (`custom.negatives`).

A record may have an `image_id` and an object a `category_id`, as in the COCO file that they come from. Training
does not use them. Predictions carry them, so that COCO tools recognise the same images and classes. Either may
have `meta`, a JSON object with keys of the user's own. It is not used, but kept when records are written again.

A chat record has a question and its answer instead of objects, with an image or without one:

    {"image": "images/7.png", "width": 640, "height": 480, "question": "How many cups are there?", "answer": "3"}
    {"question": "What is the capital of France?", "answer": "Paris"}

`image` is the address of an image (`coordexp.data.addresses`): a file, relative to the folder of the data file, or
a part of one. Files are streamed, and `RecordFile` reads any line without the
others. A line that breaks a rule is a `DataError` that names the file and the line number.
"""

import json
import os
import reprlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    Strict,
    TypeAdapter,
    ValidationError,
    with_config,
)
from pydantic_core import ErrorDetails, core_schema
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12, and brings the package

from coordexp.data.addresses import find_url_problem, join_address
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
from coordexp.data.index import RecordIndex, identify, open_indices, open_records
from coordexp.errors import DataError, explain
from coordexp.files import open_file
from coordexp.tasks import ignore

T = TypeVar("T")
Space = Literal["pixel", "unit", "norm1000", "bin"]
SPACES: tuple[Space, ...] = get_args(Space)
_SIDES = {"unit": 1.0, "norm1000": 1000.0, "bin": BINS - 1.0}  # of an image in the spaces that are not pixels
LARGEST_ID = 2**63  # ids are 64-bit numbers in COCO's tools
LARGEST = 1e12  # larger than any coordinate; excludes infinity, NaN and integers that no float can hold
SHOWN_PROBLEMS = 6  # that a message names
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")  # in a dict and in a dataclass
_CHAT_KEYS = ("messages", "conversations", "instruction")  # in lines of ms-swift, LLaMA-Factory and LLaVA
# Words of pydantic that a reader of JSON does not know.
_PLAIN_WORDS = {"Tuple": "List", "valid tuple": "list", "valid list": "list", " after validation": ""}


_Side = Annotated[int, Strict(), Field(gt=0)]
Id = Annotated[int, Strict(), Field(ge=0, lt=LARGEST_ID)]
_Words = Annotated[str, Strict()]
_Meta = dict[str, Any]  # the user's own keys
_Coordinates = list[Annotated[float, Strict(), Field(gt=-LARGEST, lt=LARGEST)]]


@with_config(ConfigDict(extra="forbid"))
class ObjectLine(TypedDict):
    """An object as it stands in a line of JSON."""

    desc: _Words
    bbox_2d: NotRequired[_Coordinates]
    poly: NotRequired[_Coordinates]
    category_id: NotRequired[Id]
    meta: NotRequired[_Meta]


@dataclass(frozen=True, slots=True)
class RecordObject:
    """An object of a record, with its coordinates in the space of the record."""

    desc: str
    kind: GeometryKind
    coords: tuple[float, ...]
    category_id: int | None = None
    meta: Mapping[str, Any] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, line: ObjectLine) -> "RecordObject":
        """Return the object of a checked line. Raise ValueError if it breaks a rule."""
        kinds = [kind for kind in GEOMETRY_KINDS if kind in line]
        if len(kinds) != 1:
            shapes = " and ".join(kinds) or "no shape"
            raise ValueError(f"it has {shapes}; it needs exactly one of {', '.join(GEOMETRY_KINDS)}")
        if not line["desc"].strip():
            raise ValueError("desc is empty; describe the object in a word or two")
        coords = line[kinds[0]]
        if not is_valid_count(kinds[0], len(coords)):
            raise ValueError(f"{kinds[0]} has {len(coords)} numbers; {COUNT_RULE}")
        return cls(line["desc"], kinds[0], tuple(coords), line.get("category_id"), line.get("meta"))

    def as_dict(self) -> dict[str, Any]:
        """Return the object as it stands in a line of JSON."""
        shape = {"desc": self.desc, self.kind: [_shorten(value) for value in self.coords]}
        optional = {"category_id": self.category_id, "meta": self.meta}
        return shape | {name: value for name, value in optional.items() if value is not None}


def _describe_object(_: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
    return core_schema.no_info_after_validator_function(RecordObject.of, handler(ObjectLine))


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a data file: an image and its objects. pydantic checks the types when a line is read."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    image: _Words
    width: _Side
    height: _Side
    space: Space
    objects: tuple[Annotated[RecordObject, GetPydanticSchema(_describe_object)], ...]
    image_id: Id | None = None
    classes: tuple[_Words, ...] | None = None
    expression: _Words | None = None
    prompt: _Words | None = None
    exhaustive: tuple[_Words, ...] | None = None
    meta: _Meta | None = field(default=None, compare=False)

    @property
    def has_request(self) -> bool:
        """True if the record has a question of its own, and not that of the run."""
        return self.classes is not None or self.expression is not None or self.prompt is not None

    @property
    def asked_objects(self) -> tuple[RecordObject, ...]:
        """The objects that are the right answer to the request of the record."""
        if self.classes is None:
            return self.objects
        return tuple(item for item in self.objects if item.desc in self.classes)

    @property
    def extent(self) -> tuple[float, float]:
        """The coordinates of the right and the bottom edge, in the space of the record."""
        return self.extent_in(self.space)

    def extent_in(self, space: Space) -> tuple[float, float]:
        """Return the coordinates of the right and the bottom edge in a space."""
        side = _SIDES.get(space)
        return (self.width, self.height) if side is None else (side, side)

    def in_pixels(self, item: RecordObject) -> tuple[float, ...]:
        width, height = self.extent
        scale = (self.width / width, self.height / height)
        return tuple(value * scale[k % 2] for k, value in enumerate(item.coords))

    def in_bins(self, item: RecordObject) -> tuple[int, ...]:
        extent = self.extent
        return tuple(to_bin(value, extent[k % 2]) for k, value in enumerate(item.coords))

    def true_objects(self) -> tuple[TrueObject, ...]:
        """Return the objects that are asked for in bins, ready for matching and training. Raise ValueError if one
        cannot be used."""
        return tuple(TrueObject(item.desc, Geometry(item.kind, self.in_bins(item))) for item in self.asked_objects)

    def as_json(self) -> str:
        objects = [item.as_dict() for item in self.objects]
        head = {"image": self.image, "width": self.width, "height": self.height, "space": self.space}
        optional = {name: value for name in OPTIONAL_KEYS if (value := getattr(self, name)) is not None}
        return json.dumps(head | optional | {"objects": objects}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ChatRecord:
    """One line of a data file: a question and its answer, about an image or, if `image` is None, about none."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    question: _Words
    answer: _Words
    image: _Words | None = None
    width: _Side = 0
    height: _Side = 0
    meta: _Meta | None = field(default=None, compare=False)

    def as_json(self) -> str:
        head = {} if self.image is None else {"image": self.image, "width": self.width, "height": self.height}
        own = {} if self.meta is None else {"meta": self.meta}
        return json.dumps(head | {"question": self.question, "answer": self.answer} | own, ensure_ascii=False)


AnyRecord = Record | ChatRecord
OPTIONAL_KEYS = ("image_id", "classes", "expression", "prompt", "exhaustive", "meta")
_RECORD = TypeAdapter(Record)
_CHAT_RECORD = TypeAdapter(ChatRecord)


def parse_record(line: str | bytes) -> Record:
    """Return the record of a line, which has objects. Raise ValueError with what is wrong with it."""
    return _expect_objects(parse_any_record(line))


def parse_any_record(line: str | bytes) -> AnyRecord:
    """Return the record of a line, with objects or with a question and its answer. Raise ValueError with what is
    wrong with it."""
    value = load_strictly(line)
    if isinstance(value, dict) and not value.keys().isdisjoint(_CHAT_KEYS):
        raise ValueError("a line of ms-swift, LLaMA-Factory or LLaVA; docs/data.md has the keys of a record")
    is_chat = isinstance(value, dict) and not value.keys().isdisjoint(("question", "answer"))
    record: AnyRecord
    try:
        record = _CHAT_RECORD.validate_python(value) if is_chat else _RECORD.validate_python(value)
    except ValidationError as error:
        raise ValueError(describe_problems(error) + _object_hint(error)) from error
    if record.image == "":
        raise ValueError("image is empty; it is the path of the image, relative to the folder of this file")
    if record.image is not None and (problem := find_url_problem(record.image)):
        raise ValueError(f"image: {problem}")
    if isinstance(record, ChatRecord):
        _check_chat(record)
    else:
        check_request(record)
    return record


def _expect_objects(record: AnyRecord) -> Record:
    if isinstance(record, ChatRecord):
        raise ValueError("it has a question and an answer; here, records with objects are needed")
    return record


def _check_chat(record: ChatRecord) -> None:
    for key in ("question", "answer"):
        if not getattr(record, key).strip():
            raise ValueError(f"{key} is empty")
    keys = [key for key in ("image", "width", "height") if getattr(record, key)]
    if 0 < len(keys) < 3:
        raise ValueError(f"it has {' and '.join(keys)}; a question about an image needs image, width and height")


def check_request(record: Record) -> None:
    """Raise ValueError if what a record asks for contradicts itself."""
    for key in ("classes", "exhaustive"):
        names = getattr(record, key) or ()
        if len(set(names)) < len(names) or not all(name.strip() for name in names):
            raise ValueError(f"{key} has an empty name, or a name twice")
    for key in ("expression", "prompt"):
        text = getattr(record, key)
        if text is not None and not text.strip():
            raise ValueError(f"{key} is empty; leave it out to ask the question of the run")
    if record.classes == ():
        raise ValueError("classes is empty; leave it out to ask the question of the run")
    if record.expression is not None and record.classes is not None:
        raise ValueError("it has an expression and classes; a record asks for one of them")
    for key, words in (("classes", "are no classes"), ("expression", "is none")):
        if f"{{{key}}}" in (record.prompt or "") and getattr(record, key) is None:
            raise ValueError(f"prompt has {{{key}}}, but there {words}")


def read_records(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield the records with their line numbers, from 1. Blank lines are skipped. Raise DataError for a chat
    record."""
    for number, record in read_any_records(path):
        yield number, _expect_objects_of_line(path, number, record)


def read_any_records(path: Path) -> Iterator[tuple[int, AnyRecord]]:
    """Yield the records of both kinds with their line numbers, from 1. Blank lines are skipped."""
    with open_records(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _parse_line(path, number, line)


class RecordFile:
    """Random access to the records of a file. Several threads may read at the same time. `notify` gets messages
    while a large file is read for the first time, unless its `index` is given. The file stays open after the first
    record was read, or is opened for each one."""

    def __init__(
        self,
        path: Path,
        notify: Callable[[str], None] = ignore,
        index: RecordIndex | None = None,
        stays_open: bool = True,
    ) -> None:
        self.path = path
        self._index = open_indices([path], notify)[0] if index is None else index
        self._stays_open = stays_open
        self._file: int | None = None
        if not len(self._index):
            raise DataError(f"{path}: no records", "write one JSON object per line (see `coordexp data import`)")

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> Record:
        """Return a record with objects. Raise DataError if it is a chat record."""
        record = self.read(index)
        return _expect_objects_of_line(self.path, self._index.line_number(range(len(self))[index]), record)

    def read(self, index: int) -> AnyRecord:
        """Return a record of either kind."""
        index = range(len(self))[index]  # an index below 0 counts from the end, and one beyond it is an IndexError
        begin, end = (int(offset) for offset in self._index.offsets[index : index + 2])
        line, _, _ = self._read_bytes(begin, end).partition(b"\n")  # blank lines may follow
        return _parse_line(self.path, self._index.line_number(index), line)

    def _read_bytes(self, begin: int, end: int) -> bytes:
        if self._file is not None:
            return os.pread(self._file, end - begin, begin)
        with open_file(self.path) as file:
            if identify(os.fstat(file.fileno())) != self._index.identity:
                raise DataError(f"{self.path} was changed while it was in use", "start again")
            if self._stays_open:  # two threads may both come here, and both descriptors are closed at the end
                self._file = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._file)
            return os.pread(file.fileno(), end - begin, begin)

    def __reduce__(self) -> Any:
        return RecordFile, (self.path,)  # another process opens the file itself

    def __str__(self) -> str:
        return str(self.path)

    @property
    def files(self) -> "tuple[RecordFile, ...]":
        """This file. A `RecordSet` has several."""
        return (self,)

    parts = files

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

    def image_address(self, record: AnyRecord) -> str:
        """Return the address of a record's image, which it must have."""
        assert record.image is not None
        return join_address(self.path.parent, record.image)


def check_value(kind: TypeAdapter[T], value: Any) -> T:
    """Return a JSON value in the form that its kind has in Python. Raise ValueError with what is wrong with it."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        raise ValueError(describe_problems(error)) from error


def describe_problems(error: ValidationError) -> str:
    """Return in one line what is wrong with a JSON value that pydantic refused."""
    problems = error.errors(include_url=False)
    shown, more = "; ".join(map(_describe_problem, problems[:SHOWN_PROBLEMS])), len(problems) - SHOWN_PROBLEMS
    return f"{shown}; and {more} more" if more > 0 else shown


def _object_hint(error: ValidationError) -> str:
    """Return which keys an object of a record has, if one of them is missing or unknown."""
    wrong_keys = {"missing", *_UNKNOWN_KEY}
    wrong = any(problem["type"] in wrong_keys and len(problem["loc"]) == 3 for problem in error.errors())
    return "; an object has desc, one of bbox_2d and poly, and may have category_id and meta" if wrong else ""


def _describe_problem(problem: ErrorDetails) -> str:
    place, kind = _format_place(problem["loc"]) or "this", problem["type"]
    if kind == "missing":
        return f"{place} is missing"
    if kind in _UNKNOWN_KEY:
        return f"{place} is an unknown key"
    if kind in ("dict_type", "dataclass_type"):
        return f"{place} is not a JSON object"
    if kind == "value_error":  # raised by a class of this package
        return f"{place}: {problem['ctx']['error']}"
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


def _parse_line(path: Path, number: int, line: bytes) -> AnyRecord:
    with explain(ValueError, f"{path}:{number}", f"run `coordexp data doctor {path}`"):
        return parse_any_record(line)


def _expect_objects_of_line(path: Path, number: int, record: AnyRecord) -> Record:
    with explain(ValueError, f"{path}:{number}", "keep questions and answers in a file of their own"):
        return _expect_objects(record)


def load_strictly(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raise ValueError if it is broken, nested too deeply, or has a key twice.

    This is not pydantic's own JSON parser: that one accepts a key twice, and refuses a lone surrogate, which the
    doctor reports with a better message."""
    try:
        return json.loads(text, object_pairs_hook=_refuse_repeated_keys)
    except RecursionError as error:
        raise ValueError("brackets are nested too deeply") from error


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
