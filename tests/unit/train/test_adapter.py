"""Adapters train the rows of the coordinate tokens, also those of an untied head, and merge exactly."""

import json

import pytest
import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3VLForConditionalGeneration

from coordexp.answers.table import VocabularyTable
from coordexp.config.settings import Adapter
from coordexp.demo.model import Size, make_model
from coordexp.errors import UserError
from coordexp.train.learner import CoordRows, freeze_parts, learner_adapter, with_adapter


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    size = Size(hidden=64, layers=2, patch=8, vision_hidden=32)
    return make_model(tmp_path_factory.mktemp("adapter") / "model", "small", tied=request.param, size=size)


def test_coordinate_rows_have_the_outputs_and_gradients_of_pefts_own_layer(folder, monkeypatch):
    first = VocabularyTable.from_folder(folder).first_coord
    ids = torch.cat((torch.arange(5, 40), torch.tensor([first, first + 7, first + 999, first + 1000])))[None]
    results = []
    for forward in (CoordRows.forward, TrainableTokensLayer.forward):
        monkeypatch.setattr(CoordRows, "forward", forward)
        torch.manual_seed(0)
        base = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        model = with_adapter(base, Adapter(rank=4, alpha=8), first)
        rows = [weight for name, weight in model.named_parameters() if "trainable_tokens_delta" in name]
        assert len(rows) == (1 if base.config.tie_word_embeddings else 2)
        with torch.no_grad():
            for weight in rows:
                weight.add_(torch.randn_like(weight) * 0.1)
        logits = model(input_ids=ids).logits
        logits.log_softmax(-1)[0, :, [first + 5, 9]].mean().neg().backward()
        results.append([logits.detach(), *(weight.grad for weight in rows)])
    for ours, pefts in zip(*results, strict=True):
        assert ours.abs().max() > 0
        assert torch.allclose(ours, pefts, rtol=1e-4, atol=1e-6)


def test_a_forward_pass_makes_no_copy_of_the_embedding(folder):
    first = VocabularyTable.from_folder(folder).first_coord
    base = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model = with_adapter(base, Adapter(rank=4, alpha=8), first)
    whole = base.get_input_embeddings().token_adapter.base_layer.weight.shape

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            result = function(*arguments, **(named or {}))
            if isinstance(result, torch.Tensor) and result.shape == whole:
                assert result._is_view() or result.untyped_storage().data_ptr() in known, function
            return result

    known = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    with Watch():
        model(input_ids=torch.arange(5, 40)[None]).logits.sum().backward()


@pytest.mark.parametrize("targets", ["all-linear", r".*language_model.*\.(q_proj|v_proj)"])
def test_an_adapter_is_given_as_peft_saves_it(folder, targets, tmp_path):
    first = VocabularyTable.from_folder(folder).first_coord
    base = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    adapter = Adapter(rank=4, alpha=8, targets=targets, train_coord_rows=False)
    model = with_adapter(base, adapter, first)
    config, weights = learner_adapter(model)
    given = dict(weights)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert given.keys() == saved.keys() and all(torch.equal(given[name], saved[name]) for name in saved)
    assert not any(weight.requires_grad for weight in given.values())
    given_config, written = (
        json.loads(json.dumps(config)),
        json.loads((tmp_path / "adapter_config.json").read_text()),
    )
    unordered = ("target_modules", "inference_mode", "auto_mapping")
    assert {name: given_config[name] for name in written if name not in unordered} == {
        name: value for name, value in written.items() if name not in unordered
    }
    assert sorted(given_config["target_modules"]) == sorted(written["target_modules"])


def test_frozen_parts_get_no_adapter_and_an_unknown_part_is_refused(folder):
    first = VocabularyTable.from_folder(folder).first_coord
    base = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model = with_adapter(base, Adapter(rank=4, alpha=8), first, ("vision", "aligner"))
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained and not [name for name in trained if "visual" in name]
    with pytest.raises(UserError, match="vision"):
        freeze_parts(torch.nn.Linear(2, 2), ("vision",))
