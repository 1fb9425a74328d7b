"""Which of several answers is trained on, and what several answers agree on."""

import pytest

from coordexp.answers.correct import Choice, Correction, choose_answer, correct
from coordexp.config import RolloutMatching
from coordexp.config.rollout import CorrectionPolicy, RolloutChoice
from coordexp.data import Geometry, TrueObject
from tests.unit.answers.test_policies import CAT, CUP, DOG, PROMPT, QWEN, box, supervised_text, text_of, write
from tests.vocabularies import encode

TRUTH = [CUP, CAT]
BEST = RolloutMatching(rollouts_per_sample=3, decoding={"temperature": 0.7})
IN_ORDER = CorrectionPolicy(insertion="reading_order")


def union(votes: int = 2, policy: CorrectionPolicy = IN_ORDER, **choice) -> RolloutMatching:
    return RolloutMatching(
        rollouts_per_sample=3,
        decoding={"temperature": 0.7},
        choice=RolloutChoice(rule="union", votes=votes, **choice),
        correction=policy,
    )


def choose(*texts: str, settings: RolloutMatching = BEST, truth: list[TrueObject] | None = None) -> Choice:
    answers = [encode(text, QWEN) for text in texts]
    return choose_answer(answers, TRUTH if truth is None else truth, table=QWEN, settings=settings)


def corrected(*texts: str, settings: RolloutMatching) -> Correction:
    choice = choose(*texts, settings=settings)
    ids = encode(texts[choice.index], QWEN)
    return correct(PROMPT, ids, TRUTH, table=QWEN, order="desc_first", settings=settings, agreed=choice.agreed)


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
    assert choose(*worse, best, truth=truth).index == len(worse)
    assert choose(*worse, best, best, truth=truth).index == len(worse)


def test_objects_of_enough_answers_that_no_label_has_are_agreed():
    near, far = box("dog", 504, 300), box("lamp", 800, 0)
    choice = choose(write(CUP, DOG), write(near, far), write(CAT, box("fox", 508, 300)), settings=union())
    assert choice.agreed == (TrueObject("dog", Geometry("bbox_2d", (504, 300, 604, 400))),)
    assert choose(write(CUP, DOG), write(near, far), settings=union(votes=3)).agreed == ()


def test_two_objects_of_one_answer_are_one_vote():
    assert choose(write(DOG, box("dog", 504, 300)), write(CUP), settings=union()).agreed == ()


def test_a_duplicate_that_all_answers_repeat_is_not_agreed():
    """The second box of each answer overlaps the first one, which matches, and the label by less than the gate."""
    pair = box("cup", 22, 0), box("cup", 55, 0)
    policy = CorrectionPolicy(duplicates="remove")
    correction = corrected(write(*pair), write(*pair), write(*pair), settings=union(policy=policy))
    assert text_of(correction) == write(pair[0], CAT)


def test_a_pseudo_label_gets_the_name_that_the_answers_agree_on():
    policy = CorrectionPolicy(insertion="in_order", supervise="matched_with_desc")
    texts = write(CUP, box("fox", 500, 300), CAT), write(DOG), write(DOG)
    correction = corrected(*texts, settings=union(policy=policy, pseudo_labels=True))
    assert text_of(correction) == write(CUP, DOG, CAT)


def test_a_wrong_name_at_the_place_of_a_label_is_not_agreed_but_another_object_there_is():
    """The answers call the cat a fox, in its place. In the second case one of them has the cat, too."""
    settings = union().model_copy(update={"match_classes": "prefer"})
    fox = box("fox", 140, 700)
    correction = corrected(write(CUP), write(fox), write(fox), settings=settings)
    assert text_of(correction) == write(CUP, CAT)
    assert choose(write(CUP, CAT, fox), write(fox), settings=settings).agreed == (fox,)


def test_an_agreed_object_is_inserted_without_supervision():
    texts = write(CUP, CAT), write(CUP, DOG), write(DOG)
    correction = corrected(*texts, settings=union())
    assert text_of(correction) == write(CUP, DOG, CAT)
    assert "dog" not in supervised_text(correction)


def test_an_agreed_object_is_taught_as_a_pseudo_label():
    texts = write(CUP, CAT), write(CUP, DOG), write(DOG)
    correction = corrected(*texts, settings=union(pseudo_labels=True))
    assert text_of(correction) == write(CUP, DOG, CAT)
    assert '"desc": "dog", "bbox_2d": ["' in supervised_text(correction)


def test_an_extra_that_other_answers_have_too_is_not_removed():
    lamp = box("lamp", 800, 400)
    policy = CorrectionPolicy(insertion="reading_order", extras="remove")
    texts = write(CUP, DOG, lamp, CAT), write(DOG)
    assert text_of(corrected(*texts, settings=union(policy=policy))) == write(CUP, DOG, CAT)
    assert text_of(corrected(*texts, settings=union(votes=3, policy=policy))) == write(CUP, CAT)
    texts = (*texts, write(lamp, DOG))
    assert text_of(corrected(*texts, settings=union(policy=policy))) == write(CUP, DOG, lamp, CAT)
    assert text_of(corrected(*texts, settings=union(votes=3, policy=policy))) == write(CUP, DOG, CAT)


def test_the_coordinates_of_an_extra_that_is_a_pseudo_label_are_taught_what_the_answers_agree_on():
    policy = CorrectionPolicy(insertion="in_order", supervise="matched")
    texts = write(CUP, DOG, CAT), write(box("dog", 520, 300)), write(box("dog", 504, 300))
    correction = corrected(*texts, settings=union(policy=policy, pseudo_labels=True))
    (item,) = [item for item in correction.rebuilt.items if item.true is None]
    assert item.targets == (504, 300, 604, 400)
    assert supervised_text(correction).count('"desc": "') == 3


def test_answers_agree_on_an_object_that_overlaps_a_label_of_another_class_only_if_classes_count():
    person = box("person", 10, 0)
    texts = write(CUP, person, CAT), write(person), write(box("cup", 10, 0))
    policy = CorrectionPolicy(duplicates="remove", extras="remove", insertion="in_order")
    settings = union(policy=policy)
    assert choose(*texts, settings=settings).agreed == ()
    by_class = settings.model_copy(update={"match_classes": "prefer"})
    assert choose(*texts, settings=by_class).agreed == (person,)
    assert text_of(corrected(*texts, settings=by_class)) == write(CUP, person, CAT)
