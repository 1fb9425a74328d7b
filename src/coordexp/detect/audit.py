"""The judgements of a person about suggestions, as the estimates from incomplete labels need them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coordexp.detect.suggestions import Decision, Suggestion, check_record, read_decisions, read_suggestions
from coordexp.errors import DataError, UserError
from coordexp.evaluate import EvaluationReport
from coordexp.evaluate.comparison import LabelledShape
from coordexp.evaluate.incomplete import AuditedObject, State
from coordexp.intervals import Floats

STATES: dict[Decision | None, State] = {"accept": "accepted", "reject": "rejected", None: "undecided"}

Judged = Sequence[tuple[Suggestion, State]]
Judgements = list[list[tuple[int, State]]]  # for each image, the numbers of predicted objects that were suggested


def read_judged(suggestions: Path, decisions: Path) -> Judged:
    """Return the suggestions with what a person says about them. Raise UserError unless those that are decided
    stand for all: they are in random order, or none is undecided."""
    file = read_suggestions(suggestions)
    decided = read_decisions(decisions, file) if file.suggestions else {}
    scores = [suggestion.score for suggestion in file.suggestions]
    left = len(scores) - len(decided)
    if left and (not decided or scores == sorted(scores, reverse=True)):
        raise UserError(
            f"{decisions}: {left:,} of {len(scores):,} suggestions are undecided, and the others may differ",
            "decide about all of them, or make them in random order with `coordexp data suggest --shuffle`",
        )
    first = min({suggestion.id for suggestion in file.suggestions} - decided.keys(), default=0)
    if decided and 0 < first < max(decided):
        raise UserError(
            f"{decisions}: suggestion {first} is undecided, and later ones are not: those do not stand for all",
            "decide about all up to the last decided one; the page shows undecided ones of all classes and scores",
        )
    return [(suggestion, STATES[decided.get(suggestion.id)]) for suggestion in file.suggestions]


def find_judged(judged: Judged, report: EvaluationReport) -> Judgements:
    """Return what a person says about the predictions of a report. Raise DataError if it is about others."""
    by_image: dict[int, list[tuple[Suggestion, State]]] = {}
    for suggestion, state in judged:
        by_image.setdefault(suggestion.image_id, []).append((suggestion, state))
    judgements: Judgements = []
    for comparison in (image.comparison for image in report.images):
        judgements.append([])
        places = [(item.desc, item.bins) for item in comparison.answer.valid]
        for suggestion, state in by_image.pop(comparison.image_id, []):
            check_record(suggestion, comparison.record)
            place = (suggestion.item.desc, comparison.record.in_bins(suggestion.item))
            if place not in places:
                raise DataError(
                    f"image_id {comparison.image_id}: suggestion {suggestion.id} is no object of the predictions",
                    "give the predictions that the suggestions were made from, without sampled answers",
                )
            judgements[-1].append((places.index(place), state))
    if by_image:
        raise DataError(f"image_id {min(by_image)} has suggestions and no answer", "give the data they are about")
    return judgements


def list_audited_objects(report: EvaluationReport, judgements: Judgements) -> list[AuditedObject]:
    """Return the labels and the suggestions of all images, without those that ask for an expression, which have no
    suggestions. A label is found if it matches a predicted object."""
    objects = []
    for number, (image, judged) in enumerate(zip(report.images, judgements, strict=True)):
        comparison, matches = image.comparison, {j: i for i, j in image.pairs}
        if comparison.record.expression is not None:
            continue
        states: list[tuple[State, LabelledShape]] = [
            ("found", comparison.predicted[matches[j]]) if j in matches else ("unseen", item)
            for j, item in enumerate(comparison.true)
        ]  # a found one has its predicted shape, as suggestions do, so that sizes are compared by one measure
        states += [(state, comparison.predicted[k]) for k, state in judged if k in image.false_positives]
        pixels = comparison.record.width * comparison.record.height
        objects += [
            AuditedObject(number, item.shape.box_area / pixels, item.desc, state) for state, item in states
        ]
    return objects


def count_judged(report: EvaluationReport, judgements: Judgements) -> Floats:
    """Return a row for each image: predicted objects that match a label, all of them, and labels; then suggestions
    among the others, those judged, and those accepted."""
    rows = []
    for image, judged in zip(report.images, judgements, strict=True):
        states = [state for k, state in judged if k in image.false_positives]
        known = len(states) - states.count("undecided")
        counts = image.counts
        rows.append([counts.pairs, counts.predicted, counts.true, len(states), known, states.count("accepted")])
    return np.array(rows, dtype=float)
