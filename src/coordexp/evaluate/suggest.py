"""Suggest labels that may be missing: objects that a model predicts and that no label explains.

A label explains a predicted object of its own class if they overlap by `iou`, and one of another class if they
overlap by `other_iou`: then the object is labelled, and the model has another name for it. The same two thresholds
decide whether two suggestions are the same object; the better score wins.

Nothing is suggested of a class that a record states to be complete (`exhaustive`), nor for a record that asks for
an expression, because it has only the labels of what the expression describes.

With sampled answers, objects of one class that overlap by `iou` are one object, at most once per answer. Its box
has the medians of their sides; a polygon is the one with the best score.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coordexp.answers.match import pairwise_iou
from coordexp.data import Geometry, Record, TrueObject, is_degenerate
from coordexp.data.suggestions import Suggestion, to_record_object
from coordexp.errors import DataError, explain
from coordexp.evaluate.answer import AnswerObject, ImageAnswer
from coordexp.evaluate.predictions import Truth, category_ids, check_same_image

RESOLUTION = 256  # pixels of the canvas on which polygons are compared

Ranking = Literal["score", "agreement", "both"]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True)
class SuggestionRules:
    """How objects are compared, and whether classes are suggested that no label has, or that are complete
    according to their record."""

    iou: float
    other_iou: float
    new_classes: bool = False
    ignore_exhaustive: bool = False
    ranking: Ranking = "both"


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

    def score(self, ranking: Ranking) -> float:
        """Return the value that the object is ranked by: its best score, its agreement, or its agreement and,
        among objects of equal agreement, the mean of its scores. With one answer, the last is the score itself."""
        if ranking == "score":
            return self.scores[0]
        if ranking == "agreement":
            return self.agreement
        return (len(self.scores) - 1 + sum(self.scores) / len(self.scores)) / self.answers


@dataclass(frozen=True, slots=True)
class ImageSuggestions:
    """The candidates to suggest for an image, from the best score, and how many others a label explains or repeat
    a better one."""

    chosen: tuple[Candidate, ...]
    explained: int
    repeated: int


@dataclass(frozen=True)
class SuggestionReport:
    """The suggestions, from the best score, and how many of all predicted objects are explained by labels, repeat
    a better one, or have a class that is complete in their record or that no label has."""

    suggestions: tuple[Suggestion, ...]
    images: int
    objects: int
    explained: int
    repeated: int
    complete: int
    new_classes: Counter[str]


def suggest_labels(truth: Truth, answers: Iterable[ImageAnswer], rules: SuggestionRules) -> SuggestionReport:
    """Return the suggestions for all images that have an answer. `answers` are greedy and sampled ones, in any
    order. Raise DataError if they are not about this data."""
    records, classes = dict(truth), category_ids(truth)
    numbered = {item.desc for _, record in truth for item in record.objects if item.category_id is not None}
    new_classes, entries = Counter[str](), list[tuple[int, Candidate]]()
    objects = explained = repeated = complete = 0
    by_image = _group_by_image(answers, records)
    for image_id, of_image in by_image.items():
        record, candidates = records[image_id], merge_answers(of_image, rules.iou)
        objects += len(candidates)
        stated = () if rules.ignore_exhaustive else record.exhaustive or ()
        missing = [item for item in candidates if item.desc not in stated]
        complete, candidates = complete + len(candidates) - len(missing), missing
        if not rules.new_classes:
            new_classes.update(item.desc for item in candidates if item.desc not in classes)
            candidates = [item for item in candidates if item.desc in classes]
        with explain(ValueError, f"image_id {image_id}", "run `coordexp data doctor` on the data"):
            result = choose_suggestions(record, candidates, rules)
        explained, repeated = explained + result.explained, repeated + result.repeated
        entries += [(image_id, item) for item in result.chosen]
    entries.sort(key=lambda entry: -entry[1].score(rules.ranking))  # equal ones stay in the order of the data
    suggestions = []
    for number, (image_id, item) in enumerate(entries, start=1):
        record = records[image_id]
        label = to_record_object(
            item.desc, item.geometry, record, classes[item.desc] if item.desc in numbered else None
        )
        agreement = item.agreement if item.answers > 1 else None
        place = (number, image_id, record.image, len(record.objects))
        suggestions.append(Suggestion(*place, label, item.score(rules.ranking), agreement))
    counts = (len(by_image), objects, explained, repeated, complete)
    return SuggestionReport(tuple(suggestions), *counts, new_classes)


def _group_by_image(answers: Iterable[ImageAnswer], records: dict[int, Record]) -> dict[int, list[ImageAnswer]]:
    """Return the answers by image, without images that could not be read and records that ask for an
    expression."""
    by_image: dict[int, list[ImageAnswer]] = {}
    for answer in answers:
        if answer.image_id not in records:
            raise DataError(
                f"image_id {answer.image_id} ({answer.image}) is not in the data",
                "give the file that was predicted on",
            )
        check_same_image(answer, records[answer.image_id])
        if answer.was_asked and records[answer.image_id].expression is None:
            by_image.setdefault(answer.image_id, []).append(answer)
    return by_image


def merge_answers(answers: Sequence[ImageAnswer], iou: float) -> list[Candidate]:
    """Return the objects that the answers to an image have. Objects of one class that overlap by `iou` are one
    object. The greedy answer comes first, so that it decides between equal scores."""
    objects = [(number, item) for number, answer in enumerate(answers) for item in answer.valid]
    objects.sort(key=lambda entry: -_score(entry[1]))
    if not objects:
        return []
    is_same = pairwise_iou([item.geometry for _, item in objects], RESOLUTION) >= iou
    is_same &= _have_same_class([str(item.desc) for _, item in objects])
    is_free = np.ones(len(objects), dtype=bool)
    candidates = []
    for first in range(len(objects)):
        if not is_free[first]:
            continue
        members: dict[int, AnswerObject] = {}
        is_same[first, first] = True
        for k in np.flatnonzero(is_same[first] & is_free).tolist():
            is_free[k] = False
            members.setdefault(*objects[k])
        candidates.append(_merge(list(members.values()), len(answers)))
    return candidates


def choose_suggestions(
    record: Record, candidates: Sequence[Candidate], rules: SuggestionRules
) -> ImageSuggestions:
    """Return the candidates that no label of the record explains and that repeat no better one. Raise ValueError
    if the record has a label that cannot be used."""
    labels = [TrueObject(item.desc, Geometry(item.kind, record.in_bins(item))) for item in record.objects]
    ranked = sorted(candidates, key=lambda item: -item.score(rules.ranking))
    if not ranked:
        return ImageSuggestions((), 0, 0)
    objects: list[TrueObject | Candidate] = [*labels, *ranked]
    overlap = pairwise_iou([item.geometry for item in objects], RESOLUTION)
    same_class = _have_same_class([item.desc for item in objects])
    is_same = overlap >= np.where(same_class, rules.iou, rules.other_iou)
    is_kept = np.arange(len(objects)) < len(labels)
    explained = int(is_same[len(labels) :, : len(labels)].any(axis=1).sum())
    chosen = []
    for k, item in enumerate(ranked, start=len(labels)):
        is_kept[k] = not (is_same[k] & is_kept).any()
        if is_kept[k]:
            chosen.append(item)
    return ImageSuggestions(tuple(chosen), explained, len(ranked) - len(chosen) - explained)


def _have_same_class(descs: Sequence[str]) -> Booleans:
    _, numbers = np.unique(np.array(descs, dtype=object), return_inverse=True)
    return np.equal.outer(numbers, numbers)


def _merge(members: Sequence[AnswerObject], answers: int) -> Candidate:
    """Return the object that these predictions, from the best score, are about."""
    best = members[0]
    geometry, scores = best.geometry, tuple(map(_score, members))
    if all(member.kind == "bbox_2d" for member in members):
        sides = np.median([member.geometry.bins for member in members], axis=0)
        bins = tuple(round(side) for side in sides.tolist())
        geometry = geometry if is_degenerate("bbox_2d", bins) else Geometry("bbox_2d", bins)
    return Candidate(str(best.desc), geometry, scores, answers)


def _score(item: AnswerObject) -> float:
    if item.score is None:
        raise DataError(f"{item.desc!r} has no score", "use predictions of `coordexp predict`, which have scores")
    return min(1.0, item.score)  # a sum of rounded log probabilities may be above 0
