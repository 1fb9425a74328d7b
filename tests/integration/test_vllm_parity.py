"""The real engine and transformers are the same model: every later comparison rests on this."""

import pytest

from coordexp.demo.generate import drawing, with_transformers, with_vllm

IMAGES = [drawing(seed, side) for seed, side in ((0, 128), (1, 128), (2, 96), (3, 160), (4, 64), (5, 128))]


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_vllm_generates_what_transformers_generates_token_for_token(lively_engine, lively_model):
    expected = with_transformers(lively_model, IMAGES, new_tokens=48)
    answers = with_vllm(lively_engine, lively_model, IMAGES, new_tokens=48)
    assert [a.prompt_ids for a in answers] == [a.prompt_ids for a in expected]
    assert [a.answer_ids for a in answers] == [a.answer_ids for a in expected]
    # The comparison means something only if the answers vary, and vary with the image.
    assert len({a.answer_ids for a in expected}) == len(IMAGES)
    assert min(len(set(a.answer_ids)) for a in expected) >= 5
