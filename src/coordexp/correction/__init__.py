"""Turn a rollout into a training target: parse its token ids strictly, match its objects with the ground truth,
and build the corrected answer with a role for every token.

Everything here is a pure function of token ids, a vocabulary table and settings. Nothing imports torch.
"""

from coordexp.correction.correct import Choice, Correction, choose_answer, correct, make_noisy_answer
from coordexp.correction.entries import PredictedObject, Reason
from coordexp.correction.formats import AnswerFormat, CoordTokenAnswers, NativeAnswers, load_format
from coordexp.correction.match import MatchResult, match_objects
from coordexp.correction.parse import ParsedRollout, ReadAnswer, parse_rollout
from coordexp.correction.segment import (
    FieldOrder,
    Role,
    Segment,
    TokenKind,
    build_chat_segment,
    build_segment,
    serialise,
)
from coordexp.correction.transport import coord_targets

__all__ = [
    "AnswerFormat",
    "Choice",
    "CoordTokenAnswers",
    "Correction",
    "FieldOrder",
    "MatchResult",
    "NativeAnswers",
    "ParsedRollout",
    "PredictedObject",
    "ReadAnswer",
    "Reason",
    "Role",
    "Segment",
    "TokenKind",
    "build_chat_segment",
    "build_segment",
    "choose_answer",
    "coord_targets",
    "correct",
    "load_format",
    "make_noisy_answer",
    "match_objects",
    "parse_rollout",
    "serialise",
]
