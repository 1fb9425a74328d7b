"""Correct an answer: parse it, match its objects, and append the missed ones, or rebuild it as a policy says.

The function is pure, and training and `coordexp replay` share it. Training on the ground truth alone is the case
of an empty answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coordexp.config.rollout import RolloutMatching
from coordexp.correction.match import MatchResult, match_objects
from coordexp.correction.parse import ParsedRollout, parse_rollout
from coordexp.correction.rebuild import Rebuilt, rebuild
from coordexp.correction.segment import FieldOrder, Segment, build_segment
from coordexp.data import TrueObject
from coordexp.vocab.table import VocabularyTable


@dataclass(frozen=True, eq=False)
class Correction:
    """A corrected answer with the steps that led to it. `match` pairs `parsed.valid` with the true objects.
    `rebuilt` is None if the answer is kept as it is and only continued."""

    parsed: ParsedRollout
    match: MatchResult
    segment: Segment
    rebuilt: Rebuilt | None = None

    @property
    def own_tokens(self) -> int:
        """Return how many tokens of the rollout the corrected answer begins with."""
        return len(self.parsed.prefix_ids) if self.rebuilt is None else self.rebuilt.own_tokens


def correct(
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    truth: Sequence[TrueObject],
    *,
    table: VocabularyTable,
    order: FieldOrder,
    settings: RolloutMatching,
    agreed: Sequence[TrueObject] | None = None,
) -> Correction:
    """Return the correction of an answer, given the token ids of its prompt and the true objects of its image.
    `agreed` are objects without a label that several answers to the image have. It is None unless the rule of the
    choice is `union`."""
    parsed = parse_rollout(answer_ids, table)
    match = match_objects(parsed.shapes, [true.geometry for true in truth], settings)
    if settings.correction.is_specified and agreed is None:
        segment = build_segment(prompt_ids, parsed, match, truth, table=table, order=order, settings=settings)
        return Correction(parsed, match, segment)
    segment, rebuilt = rebuild(
        prompt_ids, parsed, match, truth, table=table, order=order, settings=settings, agreed=agreed or ()
    )
    return Correction(parsed, match, segment, rebuilt)
