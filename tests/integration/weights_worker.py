"""Check the learner's weights on one of several ranks, replicated and sharded: `torchrun weights_worker.py
FOLDER...`, with a model in each folder. A failed check ends the process."""

import copy
import itertools
import sys
from pathlib import Path

import torch
from peft import get_peft_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import Qwen3VLForConditionalGeneration

from coordexp.answers.table import VocabularyTable
from coordexp.config.settings import Adapter
from coordexp.train.learner import learner_adapter, learner_weights, with_adapter
from tests.integration.step_worker import make_accelerator

LORA = Adapter(rank=3, alpha=8)
ALONE = LORA.model_copy(update={"train_coord_rows": False})
ADAPTERS = (None, LORA, LORA.model_copy(update={"dora": True}), ALONE)


def check(folder: Path, adapter: Adapter | None, mode: str) -> None:
    """Compare with what peft merges in one process, before and after a step."""
    accelerator = make_accelerator(sharded=mode == "fsdp2")
    torch.manual_seed(0)
    base = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model = with_adapter(base, adapter, VocabularyTable.from_folder(folder).first_coord).train()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.05)
    whole = copy.deepcopy(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert (mode == "fsdp2") == all(isinstance(weight, DTensor) for weight in model.parameters())
    assert_equal(model, whole, exact=True)
    if adapter == ALONE:
        assert_equal_adapter(model, whole)
    for learner, its_optimizer in ((model, optimizer), (whole, torch.optim.SGD(whole.parameters(), lr=0.1))):
        learner(input_ids=torch.arange(5, 40)[None]).logits.log_softmax(-1)[0, :, 7].mean().neg().backward()
        its_optimizer.step()
    assert_equal(model, whole, exact=False)
    del model, optimizer  # a DDP wrapper that outlives its process group can wait for it forever


def assert_equal(model: torch.nn.Module, whole: torch.nn.Module, exact: bool) -> None:
    copied = copy.deepcopy(whole)
    expected = dict(
        (copied.merge_and_unload() if hasattr(copied, "merge_and_unload") else copied).named_parameters()
    )
    weights = dict(learner_weights(model))
    assert list(weights) == list(expected), set(weights) ^ set(expected)
    for name, weight in weights.items():
        assert not isinstance(weight, DTensor)
        assert not weight.requires_grad
        same = torch.equal if exact else torch.allclose
        assert same(weight, expected[name]), name


def assert_equal_adapter(model: torch.nn.Module, whole: torch.nn.Module) -> None:
    """Assert that the adapter of a learner on several ranks is the one that peft saves in one process."""
    _, weights = learner_adapter(model)
    gathered, expected = dict(weights), get_peft_model_state_dict(whole, save_embedding_layers=False)
    assert list(gathered) == list(expected), set(gathered) ^ set(expected)
    for name, weight in gathered.items():
        assert not isinstance(weight, DTensor)
        assert torch.equal(weight, expected[name]), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    for mode, folder, adapter in itertools.product(("ddp", "fsdp2"), map(Path, sys.argv[1:]), ADAPTERS):
        if mode == "fsdp2" and adapter and folder.name == "tied":
            continue  # accelerate does not see that the two wrapped embeddings are tied, and cannot shard them
        check(folder, adapter, mode)
    make_accelerator(sharded=False).end_training()
