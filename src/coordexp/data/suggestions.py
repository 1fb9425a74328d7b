"""Suggested labels on disk, the decisions about them, and the data set that they complete.

    suggestions.jsonl  {"id": 1, "image_id": 7, "image": "images/7.png", "labels": 4, "desc": "red cup",
                        "bbox_2d": [10, 20, 110, 220], "category_id": 3, "score": 0.93, "agreement": 1.0}
    decisions.json     {"format": 1, "suggestions": "sha256 of suggestions.jsonl",
                        "decisions": {"1": "accept", "2": "reject"}}

A suggestion is an object that a model predicts and that no label of its record explains. Its id is its place in
the file, from 1, and the best score comes first. It is a box or a polygon (`poly`) in the space of its record, and
`labels` is how many labels that record had. `category_id` is there if the class has one, `agreement` if answers
were sampled. Reading is strict: a file that breaks a rule is a `DataError`.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from coordexp.data.geometry import BINS, Geometry
from coordexp.data.records import (
    Id,
    ObjectLine,
    Record,
    RecordFile,
    RecordObject,
    Space,
    describe_problems,
    load_strictly,
    read_object,
)
from coordexp.errors import DataError, explain
from coordexp.files import read_file, write_whole

FORMAT = 1  # of decisions.json
DIGITS: dict[Space, int] = {"pixel": 3, "norm1000": 3, "unit": 6, "bin": 0}  # after the decimal point
_MADE_BY = "use the file that `coordexp data suggest` wrote"
_SAME_FILE = "give the file that the suggestions were made for"
_DOWNLOADED = "use the file that the page of `coordexp data suggest` saved"

Decision = Literal["accept", "reject"]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A label that may be missing. `item` is in the space of the record, which has `labels` labels. `agreement` is
    the share of the answers that have the object, None if there was only one answer."""

    id: int
    image_id: int
    image: str
    labels: int
    item: RecordObject
    score: float
    agreement: float | None = None

    def check_record(self, record: Record) -> None:
        """Raise DataError unless this is the record that the label was suggested for, and unchanged."""
        if self.image != record.image:
            raise DataError(
                f"image_id {self.image_id} is {self.image!r} in the suggestions and {record.image!r} in the data",
                _SAME_FILE,
            )
        if self.labels != len(record.objects):
            raise DataError(
                f"image_id {self.image_id} has {len(record.objects)} labels, and had {self.labels} when others "
                "were suggested",
                "give the file as it was then, or run `coordexp data suggest` again",
            )

    def as_json(self) -> str:
        head = {"id": self.id, "image_id": self.image_id, "image": self.image, "labels": self.labels}
        agreement = {} if self.agreement is None else {"agreement": round(self.agreement, 6)}
        return json.dumps(
            head | self.item.as_dict() | {"score": round(self.score, 6)} | agreement, ensure_ascii=False
        )


def group_by_image(suggestions: Iterable[Suggestion]) -> dict[int, list[Suggestion]]:
    """Return the suggestions by image_id, those of an image in their order."""
    by_image: dict[int, list[Suggestion]] = {}
    for suggestion in suggestions:
        by_image.setdefault(suggestion.image_id, []).append(suggestion)
    return by_image


def check_all_used(rest: Mapping[int, Sequence[Suggestion]], records: RecordFile) -> None:
    """Raise DataError if suggestions are left when all records of a file have taken theirs."""
    if rest:
        raise DataError(f"{records}: no record has image_id {min(rest)}, which suggestions name", _SAME_FILE)


_Share = Annotated[float, Strict(), Field(ge=0, le=1)]


@with_config(ConfigDict(extra="forbid"))
class _SuggestionLine(ObjectLine):
    id: Annotated[int, Strict(), Field(ge=1)]
    image_id: Id
    image: Annotated[str, Strict()]
    labels: Annotated[int, Strict(), Field(ge=0)]
    score: _Share
    agreement: NotRequired[_Share]


@with_config(ConfigDict(extra="forbid"))
class _DecisionsFile(TypedDict):
    format: Literal[1]
    suggestions: Annotated[str, Strict()]
    decisions: dict[Annotated[str, Field(pattern=r"^[1-9][0-9]*$")], Decision]


_SUGGESTION_LINE = TypeAdapter(_SuggestionLine)
_DECISIONS_FILE = TypeAdapter(_DecisionsFile)


@dataclass(frozen=True)
class SuggestionFile:
    """All suggestions of a file, in its order, and the hash of the file, by which decisions name it."""

    suggestions: tuple[Suggestion, ...]
    sha256: str


def to_record_object(desc: str, geometry: Geometry, record: Record, category_id: int | None) -> RecordObject:
    """Return a predicted object as a label of the record, in its space. The label has the bins of the geometry."""
    extent, digits = record.extent, DIGITS[record.space]
    coords = (round(bin / (BINS - 1) * extent[k % 2], digits) for k, bin in enumerate(geometry.bins))
    return RecordObject(desc, geometry.kind, tuple(coords), category_id)


def write_suggestions(path: Path, suggestions: Iterable[Suggestion]) -> SuggestionFile:
    """Write the file whole or not at all, and return its content."""
    kept = tuple(suggestions)
    content = "".join(f"{suggestion.as_json()}\n" for suggestion in kept).encode("utf-8", "backslashreplace")
    write_whole(path, content)
    return SuggestionFile(kept, hashlib.sha256(content).hexdigest())


def read_suggestions(path: Path) -> SuggestionFile:
    with explain(OSError, f"{path} cannot be read", _MADE_BY):
        content = read_file(path)
    suggestions = []
    for number, line in enumerate(content.splitlines(), start=1):
        with explain(ValueError, f"{path}:{number}", _MADE_BY):
            suggestions.append(_parse_suggestion(line, number))
    return SuggestionFile(tuple(suggestions), hashlib.sha256(content).hexdigest())


def _parse_suggestion(line: bytes, number: int) -> Suggestion:
    """Return the suggestion of a line. Raise ValueError with what is wrong with it."""
    try:
        value = _SUGGESTION_LINE.validate_python(load_strictly(line))
    except ValidationError as error:
        raise ValueError(describe_problems(error)) from error
    if value["id"] != number:
        raise ValueError(f"id {value['id']}; ids are the numbers of the lines, from 1")
    item = read_object(value, "the suggestion")
    place = (value["id"], value["image_id"], value["image"], value["labels"])
    return Suggestion(*place, item, value["score"], value.get("agreement"))


def read_decisions(path: Path, suggestions: SuggestionFile) -> dict[int, Decision]:
    """Return the decisions by the id of the suggestion. Raise DataError if they are about other suggestions."""
    with explain((OSError, ValueError), f"{path} cannot be read", _DOWNLOADED):
        value: Any = load_strictly(read_file(path))
    try:
        document = _DECISIONS_FILE.validate_python(value)
    except ValidationError as error:
        raise DataError(f"{path}: {describe_problems(error)}", _DOWNLOADED) from error
    decisions = {int(id): decision for id, decision in document["decisions"].items()}
    unknown = [id for id in decisions if id > len(suggestions.suggestions)]
    if document["suggestions"] != suggestions.sha256 or unknown:
        raise DataError(
            f"{path} has decisions about other suggestions",
            "give the suggestions.jsonl that the page was made with; the two are written by one command",
        )
    return decisions


def accept(
    suggestions: Sequence[Suggestion], decisions: Mapping[int, Decision], above: float | None
) -> list[Suggestion]:
    """Return the accepted suggestions. A decision counts first; without one, a score of at least `above` does."""
    chosen = []
    for suggestion in suggestions:
        decision = decisions.get(suggestion.id)
        if decision == "accept" or (decision is None and above is not None and suggestion.score >= above):
            chosen.append(suggestion)
    return chosen


def complete_records(records: RecordFile, accepted: Sequence[Suggestion], folder: Path) -> Iterator[Record]:
    """Yield all records of a file with the accepted labels, for a file in `folder`. Raise DataError if the file is
    not the one that the suggestions were made for, or has been changed since."""
    by_image = group_by_image(accepted)
    for index in range(len(records)):
        image_id, record = records.read_with_image_id(index)
        added = by_image.pop(image_id, [])
        for suggestion in added:
            suggestion.check_record(record)
        image = move_image_path(record.image, records.path.parent, folder)
        yield replace(add_labels(record, [suggestion.item for suggestion in added]), image=image)
    check_all_used(by_image, records)


def add_labels(record: Record, added: Sequence[RecordObject]) -> Record:
    """Return the record with more labels. If its labels are in reading order (by their top edges, then by their
    left edges), so are those of the result. Otherwise the new ones come last, in reading order."""
    new = sorted(added, key=_corner)
    if list(record.objects) != sorted(record.objects, key=_corner):
        return replace(record, objects=(*record.objects, *new))
    return replace(record, objects=tuple(sorted((*record.objects, *new), key=_corner)))


def _corner(item: RecordObject) -> tuple[float, float]:
    """Return the top and the left edge of an object."""
    return min(item.coords[1::2]), min(item.coords[::2])


def move_image_path(image: str, folder: Path, target: Path) -> str:
    """Return the path of an image, which is relative to `folder`, relative to the folder `target`. An absolute
    path stays as it is."""
    if folder.resolve() == target.resolve() or Path(image).is_absolute():
        return image
    file = folder / image
    return Path(os.path.relpath(file.parent.resolve() / file.name, target.resolve())).as_posix()
