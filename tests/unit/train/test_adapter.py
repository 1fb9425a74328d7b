"""Adapters train the rows of the coordinate tokens, of the head too where it has its own, and merge exactly."""

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from coordexp.config.settings import Adapter
from coordexp.demo.model import Size, make_model
from coordexp.train.adapter import with_adapter
from coordexp.vocab import VocabularyTable


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    size = Size(hidden=64, layers=2, patch=8, vision_hidden=32)
    return make_model(tmp_path_factory.mktemp("adapter") / "model", "small", tied=request.param, size=size)


@pytest.mark.parametrize("dora", [False, True])
def test_coordinate_rows_are_trained_and_the_merged_model_is_the_same(folder, dora):
    torch.manual_seed(0)
    first = VocabularyTable.from_folder(folder).first_coord
    base = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    before = base.lm_head.weight[first : first + 1000].clone()
    model = with_adapter(base, Adapter(rank=4, alpha=8, dora=dora), first)
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    ids = torch.arange(5, 40)[None]
    for _ in range(2):
        model(input_ids=ids).logits.log_softmax(-1)[0, :, first + 5].mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        merged = model.merge_and_unload()
        assert torch.allclose(merged(input_ids=ids).logits, adapted, rtol=1e-4, atol=1e-4)
    rows = merged.lm_head.weight[first : first + 1000]
    assert not torch.allclose(rows, before, atol=1e-6)
