"""A checkpoint with added coordinate tokens gives the same answers in vLLM and in transformers."""

import pytest

from coordexp.answers.expand import add_coord_tokens
from coordexp.answers.table import VocabularyTable
from coordexp.demo.model import make_model
from tests.engines import drawing, start_vllm, stop_vllm, with_transformers, with_vllm


@pytest.mark.engine
@pytest.mark.timeout(480)
def test_vllm_and_transformers_agree_on_an_expanded_checkpoint(tmp_path):
    plain = make_model(tmp_path / "plain", tied=False, spread=6.0, coords=False)
    add_coord_tokens(plain, tmp_path / "expanded", noise=1.0)
    table = VocabularyTable.from_folder(tmp_path / "expanded")
    images = [drawing(seed) for seed in range(4)]
    expected = with_transformers(tmp_path / "expanded", images, new_tokens=32)
    engine = start_vllm(tmp_path / "expanded")
    answers = with_vllm(engine, tmp_path / "expanded", images, new_tokens=32)
    stop_vllm(engine)
    assert [a.answer_ids for a in answers] == [a.answer_ids for a in expected]
    assert any(table.is_coord(id) for answer in answers for id in answer.answer_ids)
