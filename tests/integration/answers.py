"""The answers of one model, asked in one process or held by several: replicated by DDP, sharded by FSDP2."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.ranks import together
from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder
from coordexp.vocab import VocabularyTable
from tests.integration.step_worker import accelerated


def whole_model(folder: Path) -> Any:
    return Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def backend(folder: Path, model: Any) -> HuggingFaceBackend:
    prompts = PromptBuilder(AutoProcessor.from_pretrained(folder), "Detect all objects.")
    return HuggingFaceBackend(lambda: model, prompts, VocabularyTable.from_folder(folder), decode_batch_size=2)


def answers(asked: HuggingFaceBackend, pictures: list[str], decode: dict[str, Any]) -> list[Any]:
    """Ids, log probabilities and the reason of the end."""
    made = Decode(40, **decode)
    requests = [Request(ImageRef(picture, 64, 64), made, seed=k) for k, picture in enumerate(pictures, start=7)]
    return [_plain(rollout) for rollout in asked.generate(requests)]


def held(folder: Path, mode: str, calls: list[dict[str, Any]], damaged: list[list[str]]) -> dict[str, Any]:
    """What this rank gets. Each call has a way of decoding, and the pictures of each rank. Then comes one that
    meets a damaged picture, and after it the first one again."""
    accelerator = accelerated(sharded=mode == "fsdp2")
    rank, model = accelerator.process_index, whole_model(folder)
    wrapped, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    model = wrapped.module if mode == "ddp" else wrapped  # as the Trainer has it
    assert (mode == "fsdp2") == all(isinstance(weight, DTensor) for weight in model.parameters())
    asked = backend(folder, model)
    found = [answers(asked, call["pictures"][rank], call["decode"]) for call in calls]
    error = None
    try:
        together(lambda: answers(asked, damaged[rank], {}))
    except Exception as failed:  # noqa: BLE001
        error = f"{type(failed).__name__}: {failed}"
    after = answers(asked, calls[0]["pictures"][rank], calls[0]["decode"])
    return {"calls": found, "error": error, "after": after}


def _plain(rollout: Rollout) -> list[Any]:
    return [list(rollout.ids), list(rollout.logprobs), rollout.finish_reason]
