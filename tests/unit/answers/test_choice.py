"""Which of several answers is trained on."""

import pytest

from coordexp.answers.correct import choose_answer
from coordexp.config import RolloutMatching
from coordexp.data import TrueObject
from tests.unit.answers.test_policies import CAT, CUP, DOG, QWEN, box, write
from tests.vocabularies import encode

TRUTH = [CUP, CAT]
BEST = RolloutMatching(rollouts_per_sample=3, decoding={"temperature": 0.7})


def choose(*texts: str, truth: list[TrueObject] | None = None) -> int:
    answers = [encode(text, QWEN) for text in texts]
    return choose_answer(answers, TRUTH if truth is None else truth, table=QWEN, settings=BEST)


AGAIN, LAMP, MUG = box("cup", 5, 5), box("lamp", 800, 400), box("mug", 0, 0)
BROKEN = write(CUP, CAT)[:-1] + ', "object_9": {"desc": "x"}}'


@pytest.mark.parametrize(
    ("worse", "best", "truth"),
    [
        ([write(CUP)], write(CUP, CAT), None),  # F1
        ([write(CUP, CAT, DOG)], write(CUP, CAT), None),
        ([write(CUP, CAT, AGAIN)], write(CUP, CAT, LAMP), None),  # duplicates
        ([write(MUG, CAT)], write(CUP, CAT), None),  # the right names
        ([BROKEN], write(CUP, CAT), None),
        (["Sure!"], "{}", []),
        ([write(CUP)], "{}", []),
        (["Sure!", "{"], write(CUP), None),
    ],
)
def test_the_best_answer_is_chosen_and_of_equal_ones_the_first(worse, best, truth):
    assert choose(*worse, best, truth=truth) == len(worse)
    assert choose(*worse, best, best, truth=truth) == len(worse)
