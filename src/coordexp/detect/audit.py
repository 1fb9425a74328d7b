"""The judgements of a person about suggestions, as the estimates from incomplete labels need them."""

from pathlib import Path

import numpy as np

from coordexp.detect.suggestions import SuggestionFile, fix_order, join_records, read_decisions, read_suggestions
from coordexp.errors import DataError, UserError
from coordexp.evaluate import EvaluationReport
from coordexp.evaluate.comparison import LabelledShape, Shape
from coordexp.evaluate.incomplete import AuditedObject, State
from coordexp.evaluate.report import ImageReport
from coordexp.intervals import Floats

Judgements = list[tuple[ImageReport, list[tuple[LabelledShape, State]]]]


def read_judged(suggestions: Path, decisions: Path) -> SuggestionFile:
    """Return the suggestions with what a person says about them. Raise UserError unless those that are decided
    stand for all: none is undecided, in complete images if there are any, or they are first in random order."""
    file = read_suggestions(suggestions)
    if file.suggestions or decisions.exists():
        file = read_decisions(decisions, file)
    asked = [item for item in file.suggestions if item.id and file.is_asked(item.image_id)]
    states, scores = [item.state for item in asked], [item.score for item in asked]
    left, is_sorted = states.count("undecided"), scores == sorted(scores, reverse=True)
    if left and (file.complete or is_sorted or not 0 < states.index("undecided") == len(states) - left):
        raise UserError(
            f"{decisions}: {left:,} of {len(states):,} suggestions are undecided, and the others may differ",
            "decide about all of them, or about the first ones in the random order of `data suggest --shuffle`",
        )
    return file


def find_judged(file: SuggestionFile, report: EvaluationReport) -> Judgements:
    """Return what a person says about the predictions of a report, and what they added. Raise DataError if it is
    about others, or if images are complete that do not stand for all."""
    judgements: Judgements = []
    comparisons = [image.comparison for image in report.images]
    joined = join_records(((item.image_id, item.record) for item in comparisons), file.suggestions)
    for image, comparison, (record, own) in zip(report.images, comparisons, joined, strict=True):
        judgements.append((image, []))
        places = [(item.desc, item.bins) for item in comparison.answer.valid]
        for suggestion in own:
            label = suggestion.to_label(record)
            place = (label.desc, record.in_bins(label))
            if suggestion.state == "added":
                shape = Shape(label.kind, record.in_pixels(label))
                judgements[-1][1].append((LabelledShape(label.desc, shape), "added"))
            elif place not in places:
                raise DataError(
                    f"image_id {comparison.image_id}: suggestion {suggestion.id} is no object of the predictions",
                    "give the predictions that the suggestions were made from, without sampled answers",
                )
            elif (k := places.index(place)) in image.false_positives:
                state = suggestion.state if file.is_asked(comparison.image_id) else "undecided"
                judgements[-1][1].append((comparison.predicted[k], state))
    first = fix_order(item.image_id for item in comparisons if item.record.expression is None)
    if wrong := file.complete ^ set(first[: len(file.complete)]):
        raise DataError(
            f"the complete images are not the first ones, which stand for all (image_id {min(wrong)})",
            "press `i` on the page, and mark images in the order of the page, from the first one",
        )
    return judgements


def list_audited_objects(judgements: Judgements) -> list[AuditedObject]:
    """Return the labels, the suggestions and what was added, without images that ask for an expression, which have
    no suggestions. A label is found if it matches a predicted object."""
    objects = []
    for number, (image, judged) in enumerate(judgements):
        comparison, matches = image.comparison, {j: i for i, j in image.pairs}
        if comparison.record.expression is not None:
            continue
        states: list[tuple[State, LabelledShape]] = [
            ("found", comparison.predicted[matches[j]]) if j in matches else ("unseen", item)
            for j, item in enumerate(comparison.true)
        ]  # a found one has its predicted shape, as suggestions do, so that sizes are compared by one measure
        states += [(state, shape) for shape, state in judged]
        pixels = comparison.record.width * comparison.record.height
        objects += [
            AuditedObject(number, item.shape.box_area / pixels, item.desc, state) for state, item in states
        ]
    return objects


def count_judged(judgements: Judgements) -> Floats:
    """Return a row for each image: predicted objects that match a label, all of them, and labels; then suggestions
    among the others, those judged, and those accepted."""
    rows = []
    for image, judged in judgements:
        states = [state for _, state in judged if state != "added"]
        known = len(states) - states.count("undecided")
        counts = image.counts
        rows.append([counts.pairs, counts.predicted, counts.true, len(states), known, states.count("accepted")])
    return np.array(rows, dtype=float)
