"""The same boxes under other scores: what of AP is ranking, and what is an artefact of order.

AP asks which detection comes first. When all scores are equal, the order of the answers decides; when they are
shuffled, chance does. Scores that mean something give an AP above both.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum

from coordexp.evaluate.answer import Answer, AnswerObject


class ScoreMode(StrEnum):
    own = "own"
    constant = "constant"
    shuffled = "shuffled"


def rescored(answers: Sequence[Answer], mode: ScoreMode, seed: int = 0) -> list[Answer]:
    """`constant` gives every valid object 1.0; `shuffled` deals the scores of all of them out again."""
    if mode is ScoreMode.own:
        return list(answers)
    dealt: list[float | None] = [found.score for answer in answers for found in answer.valid]
    if mode is ScoreMode.shuffled:
        random.Random(seed).shuffle(dealt)  # noqa: S311  (not a secret)
    else:
        dealt = [1.0] * len(dealt)
    deck = iter(dealt)
    return [replace(answer, objects=tuple(_with(found, deck) for found in answer.objects)) for answer in answers]


def _with(found: AnswerObject, deck: Iterator[float | None]) -> AnswerObject:
    return found if found.reason is not None else replace(found, score=next(deck))
