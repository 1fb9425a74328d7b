"""A real engine and transformers compute the same model. Every other comparison relies on this."""

import pytest

from tests.engines import drawing, with_transformers, with_vllm

IMAGES = [drawing(seed, side) for seed, side in ((0, 128), (1, 128), (2, 96), (3, 160), (4, 64), (5, 128))]


@pytest.mark.engine
@pytest.mark.timeout(480)
def test_vllm_generates_what_transformers_generates_token_for_token(lively_engine, lively_model):
    expected = with_transformers(lively_model, IMAGES, new_tokens=48)
    answers = with_vllm(lively_engine, lively_model, IMAGES, new_tokens=48)
    assert answers == expected
    # The comparison means something only if the answers vary, and vary with the image.
    assert len({answer.answer_ids for answer in expected}) == len(IMAGES)
    assert min(len(set(answer.answer_ids)) for answer in expected) >= 5
