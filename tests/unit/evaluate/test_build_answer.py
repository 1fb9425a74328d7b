"""Build an answer from generated tokens: which objects are parsed, and how they score."""

import math

import pytest

from coordexp.answers.formats import CoordTokenAnswers
from coordexp.evaluate.answer import build_answer
from coordexp.rollout.backend import Rollout
from tests.vocabularies import encode, table

ENTRY = '"object_%d": {"desc": "cup", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_30|>", "<|coord_%d|>"]}'


def generate(text, logprob=lambda id: 0.0):
    ids = encode(text, table("qwen"))
    return Rollout.of(table("qwen"), (), ids, [logprob(id) for id in ids], "stop")


FIRST_GEOMETRY = (
    '"object_%d": {"bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_30|>", "<|coord_40|>"], "desc": "%s"}'
)
FIRST_DESC = (
    '"object_%d": {"desc": "%s", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_30|>", "<|coord_40|>"]}'
)


def make_improbable(word):
    """Return log probabilities: 0.5 for one word of the vocabulary, 0.1 for coordinates and 1 for all else."""
    vocabulary = table("qwen")
    (id_of_word,) = encode(word, vocabulary)
    return lambda id: math.log(0.1) if vocabulary.is_coord(id) else math.log(0.5) if id == id_of_word else 0.0


@pytest.mark.parametrize("form", [FIRST_DESC, FIRST_GEOMETRY])
def test_a_score_is_the_probability_of_an_objects_own_words_in_either_order(form):
    text = "{" + ", ".join(form % values for values in ((1, "cup"), (2, "dog"), (3, "cup"))) + "}"
    answer = build_answer(7, "a.png", generate(text, make_improbable("cup")), CoordTokenAnswers(table("qwen")))
    assert [item.score for item in answer.objects] == pytest.approx([0.5, 1.0, 0.5])
    assert (answer.image_id, answer.text, answer.finish_reason) == (7, text, "stop")


def test_the_tokens_of_a_refused_object_do_not_count_for_the_next_one():
    flat = (FIRST_DESC % (1, "cup")).replace("coord_40", "coord_2")
    text = "{" + flat + ", " + FIRST_DESC % (2, "dog") + "}"
    answer = build_answer(1, "a.png", generate(text, make_improbable("cup")), CoordTokenAnswers(table("qwen")))
    assert [item.score for item in answer.objects] == [None, pytest.approx(1.0)]


def test_the_choice_to_go_on_counts_for_the_object_that_follows():
    vocabulary = table("qwen")
    text = "{" + FIRST_DESC % (1, "cup") + ", " + FIRST_DESC % (2, "cup") + "}"
    ids = encode(text, vocabulary)
    going_on = next(k for k, id in enumerate(ids) if vocabulary.pieces[id].endswith(b"},"))
    logprobs = tuple(math.log(0.25) if k == going_on else 0.0 for k in range(len(ids)))
    answer = build_answer(
        1, "a.png", Rollout.of(vocabulary, (), ids, logprobs, "stop"), CoordTokenAnswers(vocabulary)
    )
    assert [item.score for item in answer.objects] == pytest.approx([1.0, 0.25])


def test_a_refused_object_has_a_reason_and_no_score():
    text = "{" + ENTRY % (1, 2) + ", " + ENTRY % (2, 50) + "}"  # the first has no height
    answer = build_answer(1, "a.png", generate(text), CoordTokenAnswers(table("qwen")))
    assert [(item.reason is None, item.score) for item in answer.objects] == [(False, None), (True, 1.0)]


def test_an_unreadable_answer_keeps_its_text():
    answer = build_answer(1, "a.png", generate("Sure!"), CoordTokenAnswers(table("qwen")))
    assert (answer.text, answer.objects) == ("Sure!", ())
