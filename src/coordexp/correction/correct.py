"""From an answer to what is trained on: read it, match it, append what was missed. Pure, and the same in training
and in `coordexp replay`. Ground truth alone is the case of an empty answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordexp.config.rollout import RolloutMatching
from coordexp.correction.match import MatchResult, match_objects
from coordexp.correction.parse import ParsedRollout, parse_rollout
from coordexp.correction.segment import Segment, build_segment
from coordexp.correction.serialise import FieldOrder
from coordexp.data import TrueObject
from coordexp.vocab.table import VocabularyTable


@dataclass(frozen=True, eq=False)
class Correction:
    """`match` pairs `parsed.valid` with the true objects."""

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
    parsed = parse_rollout(answer_ids, table)
    predicted = [found.geometry for found in parsed.valid if found.geometry is not None]
    match = match_objects(predicted, [true.geometry for true in truth], settings)
    segment = build_segment(prompt_ids, parsed, match, truth, table=table, order=order, settings=settings)
    return Correction(parsed, match, segment)
