"""Rollouts from the learner's own model, with transformers' `generate`: no engine, no second set of weights.

Batches are padded, not packed. While the model generates it is in eval mode and computes no gradients; afterwards
it is in its former mode again, also after an error.

Four processors change the scores before a token is chosen: record, bias, guard, sample. All but the recorder know
nothing about a row but its ids, so beams may change places between tokens.

The last two characters of an answer with objects are `}}`: the end of its last object and its own end. Some
vocabularies have tokens for both (`}}` or `"}}`, as that of Qwen); others write two tokens, and then the second
one closes the answer. An empty answer, `{}`, has no `}}`, so the stop bias does not change whether an answer is
empty.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import RepeatTerminate
from coordexp.data.stores import read_ahead
from coordexp.errors import EngineError
from coordexp.ranks import gather_texts, is_sharded, together
from coordexp.rollout.backend import Decode, Request, Rollout, RolloutBackend, TextRequest, Weights, common_decode
from coordexp.rollout.guard import cut_at_end, find_loops, key_pattern_for
from coordexp.rollout.prompt import PromptBuilder, load_image, make_blank_image
from coordexp.tasks import ignore

END = b"}}"
SHORT_ANSWERS = (b'{"object_1": {"desc": "a", "bbox_2d": []}}', b'{"object_1": {"bbox_2d": [], "desc": "a"}}')


@dataclass(frozen=True)
class ClosingTokens:
    """The ids of the tokens that complete `}}`: those of `alone` after any token, and those of `after` only after
    a token of `before`."""

    alone: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, table: VocabularyTable) -> "ClosingTokens":
        pieces = [(id, piece) for id, piece in enumerate(table.pieces) if b"}" in piece]
        return cls(
            tuple(id for id, piece in pieces if END in piece),
            tuple(id for id, piece in pieces if piece.endswith(b"}")),
            tuple(id for id, piece in pieces if piece.startswith(b"}") and END not in piece),
        )


def engine_bias(decode: Decode, table: VocabularyTable) -> dict[int, float]:
    """Return what a vLLM engine adds to the logits of tokens, by id.

    An engine applies it without looking at the token before. So it reaches only tokens that close an answer
    alone. Raise EngineError if the tokenizer closes answers with others."""
    if not decode.stop_bias:
        return {}
    closing = ClosingTokens.of(table)
    if any(table.encode(answer)[-1] not in closing.alone for answer in SHORT_ANSWERS):
        raise EngineError(
            f"stop bias {decode.stop_bias:g}: this tokenizer has no single token for the end of an answer, "
            f"{END.decode()}, so a vLLM engine cannot apply it",
            "use --backend hf",
        )
    return dict.fromkeys(closing.alone, -decode.stop_bias)


class Recorder(LogitsProcessor):
    """Records the log probability of each chosen token. It keeps the scores of one step only."""

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._last is not None:
            self._logprobs.append(self._last.gather(1, input_ids[:, -1:])[:, 0])
        self._last = scores.float().log_softmax(-1)
        return scores

    def logprobs(self, new: Tensor) -> Tensor:
        """Return the log probabilities of the new tokens: [sequences, tokens]."""
        assert self._last is not None
        return torch.stack([*self._logprobs, self._last.gather(1, new[:, -1:])[:, 0]], dim=1)


class StopBias(LogitsProcessor):
    """Subtracts `bias` from the scores of all tokens that would close the answer of their row."""

    def __init__(self, closing: ClosingTokens, bias: float) -> None:
        self.bias = bias
        groups = (closing.alone, closing.before, closing.after)
        self._alone, self._before, self._after = (torch.tensor(ids, dtype=torch.long) for ids in groups)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        biased = scores.clone()
        biased[:, self._alone.to(scores.device)] -= self.bias
        may_complete = torch.isin(input_ids[:, -1:], self._before.to(input_ids.device))  # [rows, 1]
        biased[:, self._after.to(scores.device)] -= self.bias * may_complete
        return biased


class Guard(LogitsProcessor):
    """Applies `guard.find_loops` to all rows at once. A row that loops can only choose its end of turn."""

    def __init__(
        self, guard: RepeatTerminate, pattern: Sequence[int], prompt_length: int, end_of_turn: int
    ) -> None:
        self.guard, self.pattern = guard, pattern
        self.prompt_length, self.end_of_turn = prompt_length, end_of_turn

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answers = input_ids[:, self.prompt_length :]
        lengths = torch.full((len(answers),), answers.shape[1], device=answers.device)
        loops = find_loops(answers, lengths, self.guard, self.pattern)
        if not bool(loops.any()):
            return scores
        guarded = scores.masked_fill(loops[:, None], -torch.inf)
        guarded[:, self.end_of_turn] = scores[:, self.end_of_turn]  # its own score: a beam does not end for free
        return guarded


class Sampler(LogitsProcessor):
    """Draws a token with a random generator per row, and leaves only that token: the choice after it is greedy.

    It draws one number in [0, 1) per row and token and looks it up in the cumulative probabilities. So the tokens
    of a row depend neither on the other rows nor on the device.
    """

    def __init__(self, decode: Decode, seeds: Sequence[int], prompt_length: int) -> None:
        self._uniform = torch.from_numpy(
            np.stack([np.random.default_rng(seed).random(decode.max_new_tokens) for seed in seeds])
        )
        self._prompt_length = prompt_length
        self._warp = LogitsProcessorList([TemperatureLogitsWarper(decode.temperature)])
        if decode.top_k != -1:
            self._warp.append(TopKLogitsWarper(decode.top_k))
        if decode.top_p < 1:
            self._warp.append(TopPLogitsWarper(decode.top_p))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self._prompt_length
        probabilities = self._warp(input_ids, scores.float()).softmax(-1).double()
        if torch.are_deterministic_algorithms_enabled():
            probabilities = probabilities.cpu()  # CUDA has no deterministic cumsum of floats
        cumulative = probabilities.cumsum(-1).to(scores.device)
        threshold = self._uniform[:, step : step + 1].to(scores.device) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, threshold, right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)


class HuggingFaceBackend(RolloutBackend):
    """Generates with the model that `model` returns. It is the model that is trained, so `sync` sends nothing.

    At most `decode_batch_size` sequences are decoded at once; each beam counts as one."""

    def __init__(
        self, model: Callable[[], Any], prompts: PromptBuilder, table: VocabularyTable, decode_batch_size: int
    ) -> None:
        self.model, self.prompts, self.table = model, prompts, table
        self.decode_batch_size = decode_batch_size
        self.version = 0

    def generate(self, requests: Sequence[Request | TextRequest]) -> list[Rollout]:
        """Return one rollout per request. Unlike other backends, this one also answers questions without an
        image."""
        read_ahead(request.image.path for request in requests if request.image is not None)
        model = self.model()
        sharded = is_sharded(model)
        size = max(1, self.decode_batch_size // (common_decode(requests).num_beams if requests else 1))
        batches = [requests[start : start + size] for start in range(0, len(requests), size)]
        fillers = _filler_requests(model, batches) if sharded else []
        rollouts: list[Rollout] = []
        with generation_mode(model):
            for batch in batches:
                rollouts += self._generate_batch(model, batch, lockstep=sharded)
            for request in fillers:
                self._generate_batch(model, [request], lockstep=True)
        return rollouts

    @property
    def requests_per_call(self) -> int:
        return self.decode_batch_size

    def sync(self, weights: Weights, version: int) -> None:
        self.version = version

    def _generate_batch(
        self, model: Any, requests: Sequence[Request | TextRequest], lockstep: bool
    ) -> list[Rollout]:
        decode, stop = common_decode(requests), self.table.end_of_turn
        pattern = key_pattern_for(decode.guard, self.table)
        rows = [
            self.prompts.text_ids(request.question)
            if isinstance(request, TextRequest)
            else self.prompts.ids(*request.image.size, request.image.path, request.question)
            for request in requests
        ]
        inputs = _pad_batch(self.prompts, requests, rows, pad=stop, device=model.device)
        if lockstep and "pixel_values" not in inputs:
            _add_blank_image(model, inputs, self.prompts.image_token)
        if lockstep:
            together(ignore)  # wait until all ranks have read their images
        start = inputs["input_ids"].shape[1]
        recorder = Recorder() if decode.mode != "beam" else None
        ids = model.generate(
            **inputs,
            max_new_tokens=decode.max_new_tokens,
            do_sample=False,  # when sampling, the Sampler leaves only the token that it has drawn
            num_beams=decode.num_beams,
            length_penalty=0.0 if decode.num_beams > 1 else None,  # the most probable beam, however short
            eos_token_id=stop,
            pad_token_id=stop,
            synced_gpus=lockstep,
            logits_processor=self._processors(decode, pattern, requests, start, recorder),
        )
        new = ids[: len(requests), start:]
        logprobs = recorder.logprobs(ids[:, start:]) if recorder else new[:, :0].float()
        rollouts = []
        answers = zip(rows, new.tolist(), logprobs[: len(requests)].tolist(), strict=True)
        for prompt_ids, new_ids, row_logprobs in answers:
            answer_ids, reason = cut_at_end(new_ids, stop, decode.guard, pattern)
            rollouts.append(Rollout.of(self.table, prompt_ids, answer_ids, row_logprobs, reason, self.version))
        return rollouts

    def _processors(
        self,
        decode: Decode,
        pattern: Sequence[int],
        requests: Sequence[Request | TextRequest],
        start: int,
        recorder: Recorder | None,
    ) -> LogitsProcessorList:
        chain = LogitsProcessorList([recorder] if recorder else [])
        if decode.stop_bias:
            chain.append(StopBias(ClosingTokens.of(self.table), decode.stop_bias))
        if decode.guard.enabled:
            chain.append(Guard(decode.guard, pattern, start, self.table.end_of_turn))
        if decode.mode == "sampling":
            chain.append(Sampler(decode, [request.seed for request in requests], start))
        return chain


@contextmanager
def generation_mode(model: Any) -> Iterator[None]:
    """Put the model into eval mode without gradients, and restore the mode of each module at the end.

    The checkpoint's generation config is set aside: `generate` would apply its repetition penalty, for example, in
    addition to the decoding that was requested."""
    training = [module for module in model.modules() if module.training]
    generator = next(module for module in model.modules() if isinstance(module, GenerationMixin))
    config, generator.generation_config = generator.generation_config, GenerationConfig()
    with ExitStack() as at_end, torch.no_grad():
        at_end.callback(setattr, generator, "generation_config", config)
        for module in training:
            at_end.callback(setattr, module, "training", True)
        model.eval()
        yield


def _filler_requests(model: Any, batches: Sequence[Sequence[Request | TextRequest]]) -> list[TextRequest]:
    """Return requests that this rank answers, with one token each, while other ranks have more batches.

    A sharded model generates on all ranks at once, because every forward pass needs all shards."""
    if "generate" not in vars(model):  # `generate` encodes images before it calls `forward`
        register_fsdp_forward_method(model, "generate")
    together(ignore)  # wait for all ranks
    most_batches = max(map(int, gather_texts(str(len(batches)))))
    return [TextRequest("Wait.", Decode.greedy(1)) for _ in range(most_batches - len(batches))]


def _pad_batch(
    prompts: PromptBuilder,
    requests: Sequence[Request | TextRequest],
    rows: list[list[int]],
    pad: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return the model's inputs, padded on the left, so that all answers begin at the same place."""
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    inputs: dict[str, Tensor] = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == prompts.image_token).int(),
    }
    images = [request.image for request in requests if request.image is not None]
    if images:
        pixels = [prompts.patches(load_image(image)) for image in images]
        inputs["pixel_values"] = torch.cat([patches for patches, _ in pixels]).to(device)
        inputs["image_grid_thw"] = torch.cat([grid for _, grid in pixels]).to(device)
    return inputs


def _add_blank_image(model: Any, inputs: dict[str, Any], image_token: int) -> None:
    """Add a row with a blank image to a batch without images. The vision tower of a sharded model runs on all
    ranks or on none, and other ranks may have images."""
    length = inputs["input_ids"].shape[1]
    ids = torch.zeros_like(inputs["input_ids"][:1])
    mask = torch.zeros_like(ids)
    ids[0, length - 1], mask[0, length - 1] = image_token, 1
    added = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == image_token).int()}
    for name, row in added.items():
        inputs[name] = torch.cat((inputs[name], row))
    patches, grid = make_blank_image(model.config.vision_config)
    inputs |= {"pixel_values": patches.to(ids.device), "image_grid_thw": grid.to(ids.device)}
