"""Which differences between the answers of the learner and of the engine count, and which prompts are refused."""

import pytest

from coordexp.errors import DataError, EngineError
from coordexp.rollout.backend import (
    Decode,
    ImageRef,
    Request,
    Rollout,
    check_length,
    check_prompt,
    check_version,
    compare_answers,
    difference,
)


def answer(ids, logprobs):
    return Rollout((1, 2), tuple(ids), "text", tuple(logprobs), "length")


OWN = answer([5, 6, 7], [-0.1, -0.2, -0.3])


def test_equal_answers_are_no_difference():
    assert difference(OWN, answer([5, 6, 7], [-0.1005, -0.2, -0.2995]), "float32") is None


def test_another_probability_of_the_same_token_is_a_difference_in_float32_and_its_place_is_named():
    text = difference(OWN, answer([5, 6, 7], [-0.1, -0.202, -0.3]), "float32")
    assert text is not None and text.startswith("token 1 of the learner is 6 with log probability -0.2000, and")


@pytest.mark.parametrize(("dtype", "shift"), [("float16", 0.2), ("bfloat16", 0.6)])
def test_with_16_bits_one_token_may_be_off_but_not_most_of_them(dtype, shift):
    assert difference(OWN, answer([5, 6, 7], [-0.1, -0.2 - 5 * shift, -0.3]), dtype) is None
    text = difference(OWN, answer([5, 6, 7], [-0.1, -0.2 - shift, -0.3 - shift]), dtype)
    assert text == f"the log probabilities of 3 tokens differ by {shift:.2f} in the median"


@pytest.mark.parametrize(
    ("dtype", "answers", "different", "is_error"),
    [
        *(("float32", 4, 1, True), ("bfloat16", 4, 1, False), ("bfloat16", 4, 2, False)),
        *(("bfloat16", 4, 3, True), ("bfloat16", 1, 1, True), ("bfloat16", 16, 3, True)),
    ],
)
def test_one_image_that_differs_with_16_bits_is_a_warning_and_three_end_the_run(
    dtype, answers, different, is_error
):
    other = answer([5, 6, 7], [-2.1, -2.2, -2.3])
    theirs = [other] * different + [OWN] * (answers - different)
    found = f"{different} of {answers} answers with version 0 differ: "
    if is_error:
        with pytest.raises(EngineError, match=f"^server 1 does not have the learner's weights: {found}.*\n  ask"):
            compare_answers("server 1", [OWN] * answers, theirs, dtype, "ask")
    else:
        warning = compare_answers("server 1", [OWN] * answers, theirs, dtype, "ask")
        assert warning is not None and warning.startswith(f"warning: server 1: {found}")
    assert compare_answers("server 1", [OWN] * answers, [OWN] * answers, dtype, "ask") is None


def test_rounding_in_bfloat16_is_no_difference():
    assert difference(OWN, answer([5, 6, 7], [-0.3, -0.0, -0.5]), "bfloat16") is None


def test_another_token_with_another_probability_is_a_difference():
    text = difference(OWN, answer([5, 9, 7], [-0.1, -2.0, -0.3]), "float32")
    assert text is not None and "and that of the engine is 9 with -2.0000" in text


def test_after_a_choice_between_equals_nothing_is_compared():
    own = answer([5, 6, 7], [-0.1, -0.8, -0.3])
    assert difference(own, answer([5, 9, 1], [-0.1, -0.8, -7.0]), "float32") is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_tokens_that_are_both_nearly_certain_come_from_two_models(dtype):
    text = difference(answer([5], [-0.01]), answer([9], [-0.01]), dtype)
    start = "token 0 of the learner is 5 with probability 0.990, and that of the engine is 9 with 0.990"
    assert text is not None and text.startswith(start)


def test_an_answer_that_ends_earlier_is_a_difference_unless_rounding_can_be_the_reason():
    shorter = answer([5, 6], [-0.1, -0.2])
    assert difference(OWN, shorter, "float32") == "the learner wrote 3 tokens and the engine 2"
    assert difference(OWN, shorter, "bfloat16") is None


@pytest.mark.parametrize(
    ("engine", "differences"),
    [
        ((11, 99, 13), r"from token 1 on: \[99, 13\] where \[12, 13\] should be"),
        ((11, 12), r"from token 2 on: the end where \[13\] should be"),
        ((11, 12, 13, 14, 15), r"from token 3 on: \[14, 15\] where the end should be"),
    ],
)
def test_a_prompt_that_differs_from_that_of_training_is_refused_with_the_place(engine, differences):
    check_prompt("1.png", (11, 12, 13), [11, 12, 13])
    with pytest.raises(
        DataError,
        match=rf"^1.png: the engine's prompt \({len(engine)} tokens\).*{differences}\n  the record's width",
    ):
        check_prompt("1.png", engine, (11, 12, 13))


def test_a_rollout_of_other_weights_than_those_of_the_last_sync_is_refused():
    rollout = Rollout((1,), (5,), "text", (-0.1,), "stop", version=3)
    check_version(rollout, 3)
    with pytest.raises(EngineError, match="weights of version 3, but should be of version 4"):
        check_version(rollout, 4)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_the_setting():
    request = Request(ImageRef("1.png", 64, 64), Decode.greedy(8))
    check_length(request, 99, 100)
    with pytest.raises(
        DataError, match=r"^1.png: the engine takes at most 100 tokens.* 100\n  raise global_max_length"
    ):
        check_length(request, 100, 100)
