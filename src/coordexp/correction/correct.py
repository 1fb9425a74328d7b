"""Correct an answer: parse it, match its objects, and append the missed ones.

The function is pure, and training and `coordexp replay` share it. Training on the ground truth alone is the case
of an empty answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coordexp.config.rollout import RolloutMatching
from coordexp.correction.match import MatchResult, match_objects
from coordexp.correction.parse import ParsedRollout, parse_rollout
from coordexp.correction.segment import FieldOrder, Segment, build_segment
from coordexp.data import TrueObject
from coordexp.vocab.table import VocabularyTable


@dataclass(frozen=True, eq=False)
class Correction:
    """A corrected answer with the steps that led to it. `match` pairs `parsed.valid` with the true objects."""

    parsed: ParsedRollout
    match: MatchResult
    segment: Segment


def correct(
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    truth: Sequence[TrueObject],
    *,
    table: VocabularyTable,
    order: FieldOrder,
    settings: RolloutMatching,
) -> Correction:
    """Return the correction of an answer, given the token ids of its prompt and the true objects of its image."""
    parsed = parse_rollout(answer_ids, table)
    predicted = [prediction.geometry for prediction in parsed.valid if prediction.geometry is not None]
    match = match_objects(predicted, [true.geometry for true in truth], settings)
    segment = build_segment(prompt_ids, parsed, match, truth, table=table, order=order, settings=settings)
    return Correction(parsed, match, segment)
