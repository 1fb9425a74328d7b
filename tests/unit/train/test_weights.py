"""An engine gets the learner's current weights, merged, named as in the checkpoint. The learner is not changed."""

import copy
from contextlib import suppress

import pytest
import torch
from safetensors import safe_open
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.answers.table import VocabularyTable
from coordexp.config.settings import Adapter
from coordexp.demo.model import Size, make_model
from coordexp.errors import UserError
from coordexp.train.learner import learner_weights, with_adapter
from tests.rows import drawing, prompt

LORA = Adapter(rank=4, alpha=8, dropout=0.1)
DORA = LORA.model_copy(update={"dora": True})


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    size = Size(hidden=64, layers=2, patch=8, vision_hidden=32)
    return make_model(tmp_path_factory.mktemp("w") / "model", "small", tied=request.param, size=size, spread=3.0)


@pytest.fixture(params=[None, LORA, DORA], ids=["full", "lora", "dora"])
def adapter(request):
    return request.param


def plain_model(folder, dtype=torch.float32):
    return Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=dtype)


def learner(folder, adapter, dtype=torch.float32):
    """Return a model whose trained parameters all got random updates."""
    torch.manual_seed(0)
    model = with_adapter(plain_model(folder, dtype), adapter, VocabularyTable.from_folder(folder).first_coord)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.05)
    return model.train()


def merged(model):
    """Return the weights as peft merges them on a copy."""
    copied = copy.deepcopy(model)
    return copied.merge_and_unload() if hasattr(copied, "merge_and_unload") else copied


def logits(model, folder):
    processor = AutoProcessor.from_pretrained(folder)
    inputs = processor(text=[prompt(processor)], images=[drawing(1, 64)], return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**inputs).logits


def state(model):
    """Return every tensor with its address and its gradient, and the state that peft keeps."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    kept = {
        name: (
            tensor.clone(),
            tensor.data_ptr(),
            id(tensor),
            tensor.requires_grad,
            None if tensor.grad is None else tensor.grad.clone(),
        )
        for name, tensor in tensors.items()
    }
    notes = {
        name: (list(getattr(module, "merged_adapters", [])), dict(getattr(module, "_caches", {})), module.training)
        for name, module in model.named_modules()
    }
    return kept, notes


def assert_same(before, after):
    assert before[1] == after[1]
    assert before[0].keys() == after[0].keys()
    for name, (value, *where, gradient) in before[0].items():
        other, *there, other_gradient = after[0][name]
        assert torch.equal(value, other), name
        assert where == there, name
        assert (gradient is None) == (other_gradient is None), name
        assert gradient is None or torch.equal(gradient, other_gradient), name


def step(model, optimizer, folder):
    ids = torch.arange(5, 40)[None]
    first = VocabularyTable.from_folder(folder).first_coord
    model(input_ids=ids).logits.log_softmax(-1)[0, :, first + 5].mean().neg().backward()
    optimizer.step()


def optimizer_of(model):
    return torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)


@pytest.mark.scenario("R07.C20", on="model")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_named_as_in_the_checkpoint_and_bit_for_bit_those_that_peft_merges(folder, adapter, dtype):
    model = learner(folder, adapter, dtype)
    expected = dict(merged(model).named_parameters())
    weights = dict(learner_weights(model))
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == shapes
    assert list(weights) == [name for name, _ in plain_model(folder).named_parameters()]
    assert {weight.dtype for weight in weights.values()} == {dtype}
    assert not any(weight.requires_grad for weight in weights.values())
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []
    base = dict(plain_model(folder, dtype).named_parameters())
    changed = {name for name in weights if not torch.equal(weights[name], base[name])}
    assert any("mlp" in name for name in changed)
    assert "model.language_model.embed_tokens.weight" in changed


@pytest.mark.slow
@pytest.mark.parametrize("consumer", ["takes all", "stops half way", "fails half way"])
def test_the_learner_is_as_before_whatever_the_consumer_does(folder, adapter, consumer):
    model = learner(folder, adapter)
    step(model, optimizer_of(model), folder)
    before = state(model)
    weights = learner_weights(model)
    with suppress(ZeroDivisionError):
        for k, (_, weight) in enumerate(weights):
            assert torch.is_grad_enabled()
            assert_same(before, state(model)) if k % 9 == 0 else None
            assert weight.grad is None
            if k == 25 and consumer == "stops half way":
                break
            if k == 25 and consumer == "fails half way":
                raise ZeroDivisionError
    weights.close()
    assert torch.is_grad_enabled()
    assert_same(before, state(model))


def test_a_layer_that_cannot_be_merged_leaves_the_learner_as_before(folder, monkeypatch):
    model = learner(folder, DORA)
    before = state(model)

    def broken(*_, **__):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr("peft.tuners.lora.dora.DoraLinearLayer.get_weight_norm", broken)
        with pytest.raises(ZeroDivisionError):
            dict(learner_weights(model))
    assert_same(before, state(model))


def test_weights_are_read_when_they_are_asked_for(folder, adapter):
    """Offloading may replace the learner's memory at any time."""
    model = learner(folder, adapter)
    weights = learner_weights(model)
    given = [next(weights)]
    for weight in model.parameters():
        weight.data = weight.data.clone() * 1.5
    expected = dict(merged(model).named_parameters())
    assert {name for name, weight in given if torch.equal(weight, expected[name])} == set()
    assert [name for name, weight in weights if not torch.equal(weight, expected[name])] == []


@pytest.mark.slow
def test_wrappers_by_compilation_and_activation_checkpointing_leave_no_trace_in_names(folder, adapter):
    model = learner(folder, adapter)
    expected = dict(learner_weights(model))
    for parent in [module for module in model.modules() if hasattr(module, "mlp")]:
        parent.mlp = torch.compile(checkpoint_wrapper(parent.mlp))
    weights = dict(learner_weights(torch.compile(model)))
    assert list(weights) == list(expected)
    assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []


def test_a_tied_head_with_an_adapter_of_its_own_is_refused(tmp_path):
    make_model(tmp_path / "m", "small", tied=True, size=Size(hidden=64, layers=1, patch=8, vision_hidden=32))
    with pytest.warns(UserWarning, match="tie"):
        model = learner(tmp_path / "m", LORA.model_copy(update={"targets": ".*lm_head"}))
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        dict(learner_weights(model))
