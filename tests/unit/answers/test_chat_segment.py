"""The segment of a chat record: its whole answer and the end of turn are supervised."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.answers.segment import Role, TokenKind, build_chat_segment
from coordexp.answers.table import normal_form
from tests.vocabularies import table

SMALL, QWEN = table("small"), table("qwen")
PROMPT = (11, 12, 13)


@pytest.mark.parametrize("vocabulary", [SMALL, QWEN])
def test_the_answer_and_the_end_of_turn_are_supervised_and_the_prompt_is_not(vocabulary):
    segment = build_chat_segment(PROMPT, "3 red cups", vocabulary)
    assert segment.ids[:3].tolist() == list(PROMPT) and segment.prompt_length == 3
    assert vocabulary.bytes_of(segment.ids[3:-1]) == b"3 red cups"
    assert segment.ids[-1] == vocabulary.end_of_turn
    assert set(segment.roles[:3]) == {Role.prompt} and set(segment.roles[3:]) == {Role.answer}
    assert set(segment.kinds[:3]) == {TokenKind.none} and set(segment.kinds[3:]) == {TokenKind.answer}
    assert segment.weights.tolist() == [0] * 3 + [1] * (len(segment) - 3)
    assert np.isnan(segment.coord_targets).all() and not segment.sides.any()


@given(st.text(min_size=1, alphabet=st.characters(exclude_categories=("Cs",))))
def test_any_answer_is_written_byte_for_byte_in_its_normal_form(answer):
    if "<|" not in answer:
        segment = build_chat_segment(PROMPT, answer, SMALL)
        assert SMALL.bytes_of(segment.ids[3:-1]) == normal_form(answer).encode()


def test_an_answer_may_have_coordinates_and_no_token_that_ends_a_turn():
    segment = build_chat_segment(PROMPT, "at <|coord_7|>", SMALL)
    assert SMALL.first_coord + 7 in segment.ids.tolist()
    for token in ("<|im_end|>", "<|image_pad|>", "<|endoftext|>"):
        with pytest.raises(ValueError, match=r"the answer contains <\|"):
            build_chat_segment(PROMPT, f"yes{token}", SMALL)
