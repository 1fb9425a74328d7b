"""What counts as a difference between the learner's answer and the engine's."""

import pytest

from coordexp.rollout.backend import Rollout
from coordexp.rollout.canary import difference


def answer(ids, logprobs):
    return Rollout((1, 2), tuple(ids), "text", tuple(logprobs), "length")


OWN = answer([5, 6, 7], [-0.1, -0.2, -0.3])


def test_equal_answers_are_no_difference():
    assert difference(OWN, answer([5, 6, 7], [-0.1005, -0.2, -0.2995]), "float32") is None


@pytest.mark.parametrize(("dtype", "shift"), [("float32", 2e-3), ("float16", 0.2), ("bfloat16", 0.6)])
def test_another_probability_of_the_same_token_is_one_and_says_where(dtype, shift):
    told = difference(OWN, answer([5, 6, 7], [-0.1, -0.2 - shift, -0.3]), dtype)
    assert told is not None and told.startswith("token 1 is 6 with log probability -0.2000 by the learner")


def test_rounding_of_bfloat16_is_none():
    assert difference(OWN, answer([5, 6, 7], [-0.3, -0.0, -0.5]), "bfloat16") is None


def test_another_token_with_another_probability_is_one():
    told = difference(OWN, answer([5, 9, 7], [-0.1, -2.0, -0.3]), "float32")
    assert told is not None and "and 9 with -2.0000 by the engine" in told


def test_after_a_choice_between_equals_nothing_is_compared():
    own = answer([5, 6, 7], [-0.1, -0.8, -0.3])
    assert difference(own, answer([5, 9, 1], [-0.1, -0.8, -7.0]), "float32") is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_tokens_that_are_both_near_certain_are_of_two_models(dtype):
    told = difference(answer([5], [-0.01]), answer([9], [-0.01]), dtype)
    assert told is not None and told.startswith("token 0 is 5 with probability 0.990 by the learner, and 9 with")


def test_an_answer_that_ends_earlier_is_one_where_rounding_cannot_be_why():
    shorter = answer([5, 6], [-0.1, -0.2])
    assert difference(OWN, shorter, "float32") == "the learner wrote 3 tokens and the engine 2"
    assert difference(OWN, shorter, "bfloat16") is None
