"""Rollouts by the learner's own model, with transformers' `generate`: no second engine, no second set of weights.

Batches are padded, never packed. The model is in eval mode and without a gradient while it answers, and as it was
before afterwards, whatever happens.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

from coordexp.ranks import gather_texts, together
from coordexp.rollout.backend import Decode, Picture, Request, Rollout, Weights, one_decode
from coordexp.rollout.guard import ended, key_pattern
from coordexp.rollout.processors import Guard, Recorder, Sampler
from coordexp.rollout.prompt import PromptBuilder
from coordexp.sharding import is_sharded
from coordexp.vocab import VocabularyTable


class HuggingFaceBackend:
    """`model` gives the model to ask, which is the one that is trained: there is nothing to send in `sync`. At
    most `decode_batch_size` sequences are decoded at once, of which each beam is one."""

    def __init__(
        self, model: Callable[[], Any], prompts: PromptBuilder, table: VocabularyTable, decode_batch_size: int
    ) -> None:
        self.model, self.prompts, self.table = model, prompts, table
        self.decode_batch_size = decode_batch_size
        self.version = 0
        self._pattern: tuple[int, ...] = ()

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        model = self.model()
        sharded = is_sharded(model)
        size = max(1, self.decode_batch_size // (one_decode(requests).num_beams if requests else 1))
        batches = [requests[start : start + size] for start in range(0, len(requests), size)]
        company = _company(model, batches) if sharded else []
        found: list[Rollout] = []
        with answering(model):
            for batch in batches:
                found += self._answers(model, batch, lockstep=sharded)
            for request in company:
                self._answers(model, [request], lockstep=True)
        return found

    @property
    def requests_per_call(self) -> int:
        return self.decode_batch_size

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sync(self, weights: Weights, version: int) -> None:
        self.version = version

    def close(self) -> None:
        pass

    def _answers(self, model: Any, requests: Sequence[Request], lockstep: bool) -> list[Rollout]:
        decode, stop = one_decode(requests), self.table.end_of_turn
        rows = [self.prompts.ids(*one.picture.size, one.picture.path) for one in requests]
        inputs = _padded(self.prompts, requests, rows, pad=stop, device=model.device)
        if lockstep:  # all ranks have read their pictures
            together(lambda: None)
        start = inputs["input_ids"].shape[1]
        recorder = Recorder() if decode.mode != "beam" else None
        ids = model.generate(
            **inputs,
            max_new_tokens=decode.max_new_tokens,
            do_sample=False,  # what is drawn when sampling, the Sampler has drawn
            num_beams=decode.num_beams,
            length_penalty=0.0 if decode.num_beams > 1 else None,  # the most probable beam, however short
            eos_token_id=stop,
            pad_token_id=stop,
            synced_gpus=lockstep,
            logits_processor=self._processors(decode, requests, start, recorder),
        )
        new = ids[:, start:]
        probable = recorder.of(new) if recorder else new[:, :0].float()
        return [
            self._rollout(row, ids, logprobs, decode)
            for row, ids, logprobs in zip(rows, new.tolist(), probable.tolist(), strict=True)
        ]

    def _processors(
        self, decode: Decode, requests: Sequence[Request], start: int, recorder: Recorder | None
    ) -> LogitsProcessorList:
        chain = LogitsProcessorList([recorder] if recorder else [])
        if decode.guard.enabled:
            if decode.guard.max_object_keys is not None and not self._pattern:
                self._pattern = key_pattern(self.table)
            chain.append(Guard(decode.guard, self._pattern, start, self.table.end_of_turn))
        if decode.mode == "sampling":
            chain.append(Sampler(decode, [request.seed for request in requests], start))
        return chain

    def _rollout(self, prompt: list[int], ids: list[int], logprobs: list[float], decode: Decode) -> Rollout:
        ids, reason = ended(ids, self.table.end_of_turn, decode.guard, self._pattern)
        return Rollout.of(self.table, prompt, ids, logprobs, reason, self.version)


@contextmanager
def answering(model: Any) -> Iterator[None]:
    """In eval mode and without a gradient; each module's own mode is restored. What the checkpoint says about
    generation is set aside: `generate` would add its repetition penalty, say, to what is asked for."""
    training = [module for module in model.modules() if module.training]
    asked = next(module for module in model.modules() if isinstance(module, GenerationMixin))
    own, asked.generation_config = asked.generation_config, GenerationConfig()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        asked.generation_config = own
        for module in training:
            module.training = True


def _company(model: Any, batches: Sequence[Sequence[Request]]) -> list[Request]:
    """A sharded model answers on all ranks at once, since every forward needs all shards. What this rank answers,
    one token each, while others have more to do: a picture of any of them."""
    if "generate" not in vars(model):  # it encodes pictures before it comes to `forward`
        register_fsdp_forward_method(model, "generate")
    together(lambda: None)  # all ranks have come here
    mine = asdict(batches[0][0].picture) if batches else None
    told = [json.loads(text) for text in gather_texts(json.dumps([len(batches), mine]))]
    pictures = [Picture(**picture) for _, picture in told if picture]
    most = max(count for count, _ in told)
    return [Request(pictures[0], Decode.greedy(1)) for _ in range(most - len(batches))]


def _padded(
    prompts: PromptBuilder, requests: Sequence[Request], rows: list[list[int]], pad: int, device: torch.device
) -> dict[str, Any]:
    """Padded on the left, so that every answer begins at the same place."""
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    pixels = [prompts.pixels(one.picture.path, one.picture.size) for one in requests]
    whole: dict[str, Tensor] = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == prompts.image_token).int(),
        "pixel_values": torch.cat([patches for patches, _ in pixels]).to(device),
        "image_grid_thw": torch.cat([grid for _, grid in pixels]).to(device),
    }
    return whole
