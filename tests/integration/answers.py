"""The answers of one model in one process, or in several: replicated with DDP, or sharded with FSDP2."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoProcessor

from coordexp.answers.table import VocabularyTable
from coordexp.families import load_model
from coordexp.ranks import together
from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder
from tests.integration.step_worker import make_accelerator


def whole_model(folder: Path) -> Any:
    return load_model(folder, dtype=torch.float32)


def backend(folder: Path, model: Any) -> HuggingFaceBackend:
    prompts = PromptBuilder(AutoProcessor.from_pretrained(folder), "Detect all objects.")
    return HuggingFaceBackend(lambda: model, prompts, VocabularyTable.from_folder(folder), decode_batch_size=2)


def answers(generator: HuggingFaceBackend, images: list[str], decode: dict[str, Any]) -> list[Any]:
    """Return the ids, log probabilities and finish reason of each answer."""
    decoding = Decode(40, **decode)
    requests = [Request(ImageRef(image, 64, 64), decoding, seed=k) for k, image in enumerate(images, start=7)]
    return [_plain(rollout) for rollout in generator.generate(requests)]


def held(folder: str, mode: str, calls: list[dict[str, Any]], damaged: list[list[str]]) -> dict[str, Any]:
    """Return the answers that this rank gets to each call, which has a decoding and the images of each rank. Then
    make a call with a damaged image, and after it the first call again."""
    accelerator = make_accelerator(sharded=mode == "fsdp2")
    rank, model = accelerator.process_index, whole_model(Path(folder))
    wrapped, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    model = wrapped.module if mode == "ddp" else wrapped  # the Trainer has it in this form
    assert (mode == "fsdp2") == all(isinstance(weight, DTensor) for weight in model.parameters())
    generator = backend(Path(folder), model)
    results = [answers(generator, call["pictures"][rank], call["decode"]) for call in calls]
    error = None
    try:
        together(lambda: answers(generator, damaged[rank], {}))
    except Exception as failed:  # noqa: BLE001
        error = f"{type(failed).__name__}: {failed}"
    after = answers(generator, calls[0]["pictures"][rank], calls[0]["decode"])
    return {"calls": results, "error": error, "after": after}


def _plain(rollout: Rollout) -> list[Any]:
    return [list(rollout.ids), list(rollout.logprobs), rollout.finish_reason]
