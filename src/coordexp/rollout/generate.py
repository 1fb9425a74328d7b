"""Answers of a Hugging Face model to pictures: padded batches, token ids, and how probable each token was."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from coordexp.rollout.generated import FinishReason, Generated, Picture
from coordexp.rollout.prompt import PromptBuilder


def generate(
    model: Any,
    prompts: PromptBuilder,
    pictures: Sequence[Picture],
    *,
    max_new_tokens: int,
    end_of_turn: int,
    lockstep: bool = False,
) -> list[Generated]:
    """Greedy answers to one batch of pictures, in eval mode and without a gradient; the mode is restored after.
    `lockstep` keeps the ranks of a sharded model together when one has finished before another."""
    inputs = _padded(prompts, pictures, pad=end_of_turn, device=model.device)
    recorder, was_training = _Recorder(), model.training
    model.eval()
    with torch.no_grad():
        ids = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=end_of_turn,
            pad_token_id=end_of_turn,
            synced_gpus=lockstep,
            logits_processor=LogitsProcessorList([recorder]),
        )
    model.train(was_training)
    new = ids[:, inputs["input_ids"].shape[1] :]
    return [_trimmed(row, probable, end_of_turn) for row, probable in zip(new, recorder.of(new), strict=True)]


class _Recorder(LogitsProcessor):
    """Keeps the log probability of each token that was taken; one step of logits at a time, not all of them."""

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._taken: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._last is not None:
            self._taken.append(self._last.gather(1, input_ids[:, -1:])[:, 0])
        self._last = scores.float().log_softmax(-1)
        return scores

    def of(self, new: Tensor) -> Tensor:
        """[sequences, tokens]"""
        assert self._last is not None
        return torch.stack([*self._taken, self._last.gather(1, new[:, -1:])[:, 0]], dim=1)


def _padded(prompts: PromptBuilder, pictures: Sequence[Picture], pad: int, device: torch.device) -> dict[str, Any]:
    """Padded on the left, so that every answer begins at the same place."""
    rows = [prompts.ids(picture.width, picture.height) for picture in pictures]
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    pixels = [prompts.pixels(picture.path, (picture.width, picture.height)) for picture in pictures]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == prompts.image_token).int(),
        "pixel_values": torch.cat([patches for patches, _ in pixels]).to(device),
        "image_grid_thw": torch.cat([grid for _, grid in pixels]).to(device),
    }


def _trimmed(ids: Tensor, logprobs: Tensor, end_of_turn: int) -> Generated:
    stops = torch.nonzero(ids == end_of_turn)
    length = int(stops[0]) if len(stops) else len(ids)
    reason: FinishReason = "stop" if len(stops) else "length"
    return Generated(tuple(ids[:length].tolist()), tuple(logprobs[:length].tolist()), reason)
