"""The formulas of `launch.memory` against PyTorch's own accounting of a model of 4B, on fake tensors."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl import modeling_qwen3_vl

from coordexp.config.settings import Adapter
from coordexp.launch.memory import Model, RowSize, total_bytes
from coordexp.tasks import ignore
from coordexp.train.learner import with_adapter
from tests.unit.launch.test_memory_measured import SUPERVISED, TEXT, build_config, estimate


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["autocast", "adapter"])
def test_a_step_of_a_4b_model_needs_what_pytorch_counts_on_fake_tensors(kind, monkeypatch):
    """With text only: the vision tower chooses tensors by the data, which fake tensors do not have."""
    monkeypatch.setattr(modeling_qwen3_vl, "create_causal_mask", no_mask)
    # peft casts a new adapter to the model's dtype and back to float32, which fake tensors cannot follow.
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        monkeypatch.setattr(torch.Tensor, name, if_trained(getattr(torch.Tensor, name)))
    tokens, planned = 16_000, Model.published("4b")
    adapter = Adapter(rank=32, alpha=64) if kind == "adapter" else None
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Qwen3VLForConditionalGeneration._from_config(
            build_config(planned.shape),
            attn_implementation="sdpa",
            dtype=torch.bfloat16 if adapter else torch.float32,
        )
        model = with_adapter(model, adapter, 0, ()) if adapter else model
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        optimizer = torch.optim.AdamW(trained, fused=True)
        optimizer.step()
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(
                    input_ids=torch.full((1, tokens), TEXT),
                    position_ids=torch.arange(tokens).expand(4, 1, tokens),
                    logits_to_keep=SUPERVISED,
                    use_cache=False,
                ).logits
            loss = logits.float().logsumexp(-1).mean()
            del logits
            loss.backward()
    (counted,) = tracker.get_tracker_snapshot("peak").values()
    learner = estimate(planned, RowSize(tokens, 0, SUPERVISED), kind, True, adapter)
    print(f"{kind}: {counted['Total'] / 2**30:.2f} GiB, by formulas {total_bytes(learner.parts()) / 2**30:.2f}")
    assert total_bytes(learner.parts()) == pytest.approx(counted["Total"], rel=0.1)
    held = total_bytes(learner.parts()) - total_bytes(learner.least())
    assert held == pytest.approx(counted[_MemRefType.ACT], rel=0.1)


def if_trained(register):
    """Return a function that gives a weight a hook only if it is trained. MemTracker also asks for one at frozen
    weights, which torch refuses."""
    no_hook = SimpleNamespace(remove=ignore)
    return lambda tensor, hook: register(tensor, hook) if tensor.requires_grad else no_hook


def no_mask(**_):
    """Return no mask: attention is then causal. Whether it may be is decided by the data, too."""
