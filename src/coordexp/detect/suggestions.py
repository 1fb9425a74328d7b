"""Labels that may be missing: objects that a model predicts and that no label explains, the decisions about them,
and the data set that they complete.

A label explains a predicted object of its own class if they overlap by `iou`, and one of another class if they
overlap by `other_iou`: then the object is labelled, and the model has another name for it. The same two thresholds
decide whether two suggestions are the same object; the better score wins.

With sampled answers, objects of one class that overlap by `iou` are one object, at most once per answer. Its box
has the medians of their sides; a polygon is the one with the best score.

    suggestions.jsonl  {"id": 1, "image_id": 7, "image": "images/7.png", "labels": 4, "desc": "red cup",
                        "bbox_2d": [10, 20, 110, 220], "category_id": 3, "score": 0.93, "agreement": 1.0}
    decisions.json     {"format": 1, "suggestions": "sha256 of suggestions.jsonl",
                        "decisions": {"1": "accept", "2": "reject"},
                        "images": {"7": {"image": "images/7.png", "labels": 4, "complete": true,
                                         "added": [{"desc": "red cup", "bbox_2d": [300, 20, 340.5, 60]}]}}}

The id of a suggestion is its place in the file, from 1. The best score comes first, unless they were shuffled. It
is a box or a polygon (`poly`) in the space of its record, and `labels` is how many labels that record had. What a
person added is in pixels; in a `complete` image, they say, no other object is missing. Reading is strict: a file
that breaks a rule is a `DataError`.

The comparison needs scipy, which is imported inside the functions: the other commands start without it.
"""

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NotRequired

import numpy as np
from pydantic import ConfigDict, Field, Strict, TypeAdapter, with_config
from typing_extensions import TypedDict

from coordexp.data import BINS, Geometry, Record, RecordFile, RecordObject, TrueObject, is_degenerate
from coordexp.data.addresses import move_address
from coordexp.data.records import Id, ObjectLine, Space, check_value, load_strictly
from coordexp.errors import DataError, explain
from coordexp.files import read_file, write_whole

if TYPE_CHECKING:
    from coordexp.evaluate.answer import AnswerObject, ImageAnswer
    from coordexp.evaluate.incomplete import State
    from coordexp.evaluate.predictions import Truth

RESOLUTION = 256  # pixels of the canvas on which polygons are compared
DIGITS: dict[Space, int] = {"pixel": 3, "norm1000": 3, "unit": 6, "bin": 0}  # after the decimal point

STATES: "dict[Literal['accept', 'reject'], State]" = {"accept": "accepted", "reject": "rejected"}


@dataclass(frozen=True)
class SuggestionRules:
    """How objects are compared, whether classes are suggested that no label has, or that are complete according to
    their record, and whether the suggestions are in random order, so that the first ones stand for all."""

    iou: float
    other_iou: float
    new_classes: bool = False
    ignore_exhaustive: bool = False
    shuffle: bool = False


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A label that may be missing. `item` is in the space of the record, which has `labels` labels. `agreement` is
    the share of the answers that have the object, None if there was only one answer. An object that a person added
    has the id 0, and is in pixels."""

    id: int
    image_id: int
    image: str
    labels: int
    item: RecordObject
    score: float
    agreement: float | None = None
    state: "State" = "undecided"

    def as_json(self) -> str:
        head = {"id": self.id, "image_id": self.image_id, "image": self.image, "labels": self.labels}
        agreement = {} if self.agreement is None else {"agreement": round(self.agreement, 6)}
        return json.dumps(
            head | self.item.as_dict() | {"score": round(self.score, 6)} | agreement, ensure_ascii=False
        )

    def to_label(self, record: Record) -> RecordObject:
        """Return the object in the space of its record. Raise DataError if what was added cannot be a label."""
        item, size = self.item, (record.width, record.height)
        if self.state != "added":
            return item
        with explain(ValueError, f"image_id {self.image_id}: the added {item.desc!r}", "draw it again"):
            if not all(0 <= value <= size[k % 2] for k, value in enumerate(item.coords)):
                raise ValueError(f"{item.kind} {item.coords} is outside of {size[0]} x {size[1]} pixels")
            bins = replace(record, space="pixel").in_bins(item)
            geometry = TrueObject(item.desc, Geometry(item.kind, bins)).geometry
        return to_record_object(item.desc, geometry, record, item.category_id)


@dataclass
class SuggestionReport:
    """The suggestions, in their order, and how many of all predicted objects are explained by labels, repeat
    a better one, or have a class that is complete in their record or that no label has."""

    suggestions: tuple[Suggestion, ...] = ()
    images: int = 0
    objects: int = 0
    explained: int = 0
    repeated: int = 0
    complete: int = 0
    new_classes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An object that some of the answers to an image have. `scores` are those of its predictions, one per answer
    that has it, from the best."""

    desc: str
    geometry: Geometry
    scores: tuple[float, ...]
    answers: int

    @property
    def agreement(self) -> float:
        """The share of the answers that have the object."""
        return len(self.scores) / self.answers

    @property
    def score(self) -> float:
        """The value that the object is ranked by: its agreement and, among objects of equal agreement, the mean of
        its scores. With one answer, it is the score itself."""
        return (len(self.scores) - 1 + sum(self.scores) / len(self.scores)) / self.answers


def suggest_labels(truth: "Truth", answers: "Iterable[ImageAnswer]", rules: SuggestionRules) -> SuggestionReport:
    """Return the suggestions for all images that have an answer. `answers` are greedy and sampled ones, in any
    order. Raise DataError if they are not about this data."""
    from coordexp.evaluate.predictions import category_ids

    records, classes, report = dict(truth), category_ids(truth), SuggestionReport()
    numbered = {item.desc for _, record in truth for item in record.objects if item.category_id is not None}
    chosen: list[tuple[int, Candidate]] = []
    for image_id, of_image in _group_answers(answers, records).items():
        record, candidates = records[image_id], merge_answers(of_image, rules.iou)
        report.images, report.objects = report.images + 1, report.objects + len(candidates)
        if record.exhaustive and not rules.ignore_exhaustive:
            missing = [item for item in candidates if item.desc not in record.exhaustive]
            report.complete, candidates = report.complete + len(candidates) - len(missing), missing
        if not rules.new_classes:
            report.new_classes.update(item.desc for item in candidates if item.desc not in classes)
            candidates = [item for item in candidates if item.desc in classes]
        with explain(ValueError, f"image_id {image_id}", "run `coordexp data doctor` on the data"):
            kept, explained = choose_candidates(record, candidates, rules)
        chosen += [(image_id, item) for item in kept]
        report.explained += explained
        report.repeated += len(candidates) - len(kept) - explained
    chosen.sort(key=lambda entry: -entry[1].score)  # equal ones stay in the order of the data
    if rules.shuffle:
        random.Random(0).shuffle(chosen)  # noqa: S311  (not a secret)
    suggestions = []
    for number, (image_id, item) in enumerate(chosen, start=1):
        record, category_id = records[image_id], classes[item.desc] if item.desc in numbered else None
        label = to_record_object(item.desc, item.geometry, record, category_id)
        agreement = item.agreement if item.answers > 1 else None
        place = (number, image_id, record.image, len(record.objects))
        suggestions.append(Suggestion(*place, label, item.score, agreement))
    report.suggestions = tuple(suggestions)
    return report


def _group_answers(answers: "Iterable[ImageAnswer]", records: dict[int, Record]) -> "dict[int, list[ImageAnswer]]":
    """Return the answers by image, without images that could not be read, and without records that ask for an
    expression: they have only the labels of what it describes."""
    from coordexp.evaluate.predictions import check_same_image

    by_image: dict[int, list[ImageAnswer]] = {}
    for answer in answers:
        check_same_image(answer, records[answer.image_id])
        if answer.was_asked and records[answer.image_id].expression is None:
            by_image.setdefault(answer.image_id, []).append(answer)
    return by_image


def merge_answers(answers: "Sequence[ImageAnswer]", iou: float) -> list[Candidate]:
    """Return the objects that the answers to an image have. Objects of one class that overlap by `iou` are one
    object. The greedy answer comes first, so that it decides between equal scores."""
    from coordexp.answers.match import have_same_name, pairwise_iou

    objects = [(number, item) for number, answer in enumerate(answers) for item in answer.valid]
    objects.sort(key=lambda entry: -_score(entry[1]))
    if not objects:
        return []
    is_same = pairwise_iou([item.geometry for _, item in objects], RESOLUTION) >= iou
    names = [str(item.desc) for _, item in objects]
    is_same &= have_same_name(names, names)
    np.fill_diagonal(is_same, True)
    is_free = np.ones(len(objects), dtype=bool)
    candidates = []
    for first in range(len(objects)):
        if is_free[first]:
            members: dict[int, AnswerObject] = {}  # by answer, each with its best object
            for k in np.flatnonzero(is_same[first] & is_free).tolist():
                is_free[k] = False
                members.setdefault(*objects[k])
            candidates.append(_merge(list(members.values()), len(answers)))
    return candidates


def _merge(members: "Sequence[AnswerObject]", answers: int) -> Candidate:
    """Return the object that these predictions, from the best score, are about."""
    best = members[0]
    geometry, scores = best.geometry, tuple(map(_score, members))
    if all(member.kind == "bbox_2d" for member in members):
        sides = np.median([member.geometry.bins for member in members], axis=0)
        bins = tuple(round(side) for side in sides.tolist())
        geometry = geometry if is_degenerate("bbox_2d", bins) else Geometry("bbox_2d", bins)
    return Candidate(str(best.desc), geometry, scores, answers)


def _score(item: "AnswerObject") -> float:
    if item.score is None:
        raise DataError(f"{item.desc!r} has no score", "use predictions of `coordexp predict`, which have scores")
    return min(1.0, item.score)  # a sum of rounded log probabilities may be above 0


def choose_candidates(
    record: Record, candidates: Sequence[Candidate], rules: SuggestionRules
) -> tuple[list[Candidate], int]:
    """Return the candidates that no label of the record explains and that repeat no better one, from the best
    score, and how many a label explains. Raise ValueError if the record has a label that cannot be used."""
    from coordexp.answers.match import have_same_name, pairwise_iou

    labels = [TrueObject(item.desc, Geometry(item.kind, record.in_bins(item))) for item in record.objects]
    if not candidates:
        return [], 0
    ranked = sorted(candidates, key=lambda item: -item.score)
    objects: list[TrueObject | Candidate] = [*labels, *ranked]
    overlap = pairwise_iou([item.geometry for item in objects], RESOLUTION)
    names = [item.desc for item in objects]
    is_same = overlap >= np.where(have_same_name(names, names), rules.iou, rules.other_iou)
    is_kept = np.arange(len(objects)) < len(labels)
    for k in range(len(labels), len(objects)):
        is_kept[k] = not (is_same[k] & is_kept).any()
    explained = int(is_same[len(labels) :, : len(labels)].any(axis=1).sum())
    return [item for item, kept in zip(ranked, is_kept[len(labels) :], strict=True) if kept], explained


def to_record_object(desc: str, geometry: Geometry, record: Record, category_id: int | None) -> RecordObject:
    """Return a predicted object as a label of the record, in its space. The label has the bins of the geometry."""
    extent, digits = record.extent, DIGITS[record.space]
    coords = (round(bin / (BINS - 1) * extent[k % 2], digits) for k, bin in enumerate(geometry.bins))
    return RecordObject(desc, geometry.kind, tuple(coords), category_id)


# The files of suggestions and decisions

_Share = Annotated[float, Strict(), Field(ge=0, le=1)]
_Number = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,18})$")]


@with_config(ConfigDict(extra="forbid"))
class _SuggestionLine(ObjectLine):
    id: Annotated[int, Strict(), Field(ge=1)]
    image_id: Id
    image: Annotated[str, Strict()]
    labels: Annotated[int, Strict(), Field(ge=0)]
    score: _Share
    agreement: NotRequired[_Share]


@with_config(ConfigDict(extra="forbid"))
class _ImageNotes(TypedDict):
    image: Annotated[str, Strict()]
    labels: Annotated[int, Strict(), Field(ge=0)]
    complete: Annotated[bool, Strict()]
    added: list[ObjectLine]


@with_config(ConfigDict(extra="forbid"))
class _DecisionsFile(TypedDict):
    format: Literal[1]
    suggestions: Annotated[str, Strict()]
    decisions: dict[_Number, Literal["accept", "reject"]]
    images: NotRequired[dict[_Number, _ImageNotes]]


_SUGGESTION_LINE = TypeAdapter(_SuggestionLine)
_DECISIONS_FILE = TypeAdapter(_DecisionsFile)


@dataclass(frozen=True)
class SuggestionFile:
    """All suggestions of a file, in its order, and the hash of the file, by which decisions name it. With these,
    also what a person added, and the images that they say are complete."""

    suggestions: tuple[Suggestion, ...] = ()
    sha256: str = ""
    complete: frozenset[int] = frozenset()

    def is_asked(self, image_id: int) -> bool:
        """Return True if decisions about an image count: if any images are complete, only those do."""
        return not self.complete or image_id in self.complete


def write_suggestions(path: Path, suggestions: Iterable[Suggestion]) -> SuggestionFile:
    """Write the file whole or not at all, and return its content."""
    kept = tuple(suggestions)
    content = "".join(f"{suggestion.as_json()}\n" for suggestion in kept).encode("utf-8", "backslashreplace")
    write_whole(path, content)
    return SuggestionFile(kept, hashlib.sha256(content).hexdigest())


def read_suggestions(path: Path) -> SuggestionFile:
    fix = "use the file that `coordexp data suggest` wrote"
    with explain(OSError, f"{path} cannot be read", fix):
        content = read_file(path)
    suggestions = []
    for number, line in enumerate(content.splitlines(), start=1):
        with explain(ValueError, f"{path}:{number}", fix):
            value = check_value(_SUGGESTION_LINE, load_strictly(line))
            if value["id"] != number:
                raise ValueError(f"id {value['id']}; ids are the numbers of the lines, from 1")
            place = (number, value["image_id"], value["image"], value["labels"])
            item = RecordObject.of(value)
            suggestions.append(Suggestion(*place, item, value["score"], value.get("agreement")))
    return SuggestionFile(tuple(suggestions), hashlib.sha256(content).hexdigest())


def read_decisions(path: Path, file: SuggestionFile) -> SuggestionFile:
    """Return the suggestions with the decisions. Raise DataError if they are about other suggestions."""
    with explain((OSError, ValueError), str(path), "use the file that the page of `coordexp data suggest` saved"):
        document = check_value(_DECISIONS_FILE, load_strictly(read_file(path)))
        images = {int(id): notes for id, notes in document.get("images", {}).items()}
        new = {id: [RecordObject.of(line) for line in notes["added"]] for id, notes in images.items()}
    states = {int(id): STATES[decision] for id, decision in document["decisions"].items()}
    if document["suggestions"] != file.sha256 or states.keys() - {item.id for item in file.suggestions}:
        raise DataError(
            f"{path} has decisions about other suggestions",
            "give the suggestions.jsonl that the page was made with; the two are written by one command",
        )
    items = [replace(item, state=states.get(item.id, "undecided")) for item in file.suggestions]
    for id, own in images.items():
        items += [Suggestion(0, id, own["image"], own["labels"], item, 1.0, None, "added") for item in new[id]]
    complete = frozenset(id for id, notes in images.items() if notes["complete"])
    return SuggestionFile(tuple(items), file.sha256, complete)


def accept(suggestions: Iterable[Suggestion], above: float | None) -> list[Suggestion]:
    """Return what was accepted or added. A decision counts first; without one, a score from `above` does."""
    least = {"rejected": math.inf, "undecided": math.inf if above is None else above}
    return [item for item in suggestions if item.score >= least.get(item.state, 0)]


def fix_order(image_ids: Iterable[int]) -> list[int]:
    """Return images in an order that does not depend on what they show, so that the first ones stand for all."""
    return sorted(image_ids, key=lambda image_id: hashlib.sha256(b"%d" % image_id).digest())


# The data set with the accepted labels


def join_records(
    records: Iterable[tuple[int, Record]], suggestions: Iterable[Suggestion]
) -> Iterator[tuple[Record, list[Suggestion]]]:
    """Yield all records, each with its suggestions. Raise DataError if they were made for others, or if these have
    been changed since."""
    by_image: dict[int, list[Suggestion]] = {}
    fix = "give the file that the suggestions were made for, as it was then"
    for item in suggestions:
        by_image.setdefault(item.image_id, []).append(item)
    for image_id, record in records:
        own, now = by_image.pop(image_id, []), f"{record.image!r} with {len(record.objects)} labels"
        for was in (f"{item.image!r} with {item.labels} labels" for item in own):
            if was != now:
                raise DataError(f"image_id {image_id} is {now}, and was {was} when others were suggested", fix)
        yield record, own
    if by_image:
        raise DataError(f"no record has image_id {min(by_image)}, which suggestions name", fix)


def complete_records(records: RecordFile, accepted: Iterable[Suggestion], folder: Path) -> Iterator[Record]:
    """Yield all records of a file with the accepted labels, for a file in `folder`. Raise DataError like
    `join_records` and `Suggestion.to_label`."""
    for record, added in join_records(map(records.read_with_image_id, range(len(records))), accepted):
        image = record.image
        if folder.resolve() != records.path.parent.resolve():
            image = move_address(image, records.path.parent, folder)
        yield replace(add_labels(record, [item.to_label(record) for item in added]), image=image)


def add_labels(record: Record, added: Sequence[RecordObject]) -> Record:
    """Return the record with more labels. If its labels are in reading order (by their top edges, then by their
    left edges), so are those of the result. Otherwise the new ones come last, in reading order."""
    objects = [*record.objects, *sorted(added, key=_corner)]
    if list(record.objects) == sorted(record.objects, key=_corner):
        objects.sort(key=_corner)
    return replace(record, objects=tuple(objects))


def _corner(item: RecordObject) -> tuple[float, float]:
    """Return the top and the left edge of an object."""
    return min(item.coords[1::2]), min(item.coords[::2])
