"""The processors of a Hugging Face model's scores before a token is chosen: record, bias, guard, sample.

All but the recorder know nothing about a row but its ids, so beams may change places between tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from coordexp.config.rollout import RepeatTerminate
from coordexp.rollout.backend import Decode
from coordexp.rollout.stop_bias import ClosingTokens


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
    """Applies `guard.loop_in` to all rows at once. A row that loops can only choose its end of turn."""

    def __init__(
        self, guard: RepeatTerminate, pattern: Sequence[int], prompt_length: int, end_of_turn: int
    ) -> None:
        self.guard, self.prompt_length, self.end_of_turn = guard, prompt_length, end_of_turn
        self._pattern = torch.tensor(pattern)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        loops = self.loops(input_ids[:, self.prompt_length :])
        if not bool(loops.any()):
            return scores
        guarded = scores.masked_fill(loops[:, None], -torch.inf)
        guarded[:, self.end_of_turn] = scores[:, self.end_of_turn]  # its own score: a beam does not end for free
        return guarded

    def loops(self, new: Tensor) -> Tensor:
        """Return a boolean per row for the new ids: [rows, tokens] -> [rows]."""
        guard, length = self.guard, new.shape[1]
        loops = torch.zeros(len(new), dtype=torch.bool, device=new.device)
        if length < guard.min_new_tokens:
            return loops
        if length >= (repeats := guard.max_consecutive_token_repeats):
            loops |= (new[:, -repeats:] == new[:, -1:]).all(1)
        size = guard.ngram_size
        if length >= (whole := size * guard.ngram_repeats):
            tail = new[:, -whole:]
            loops |= (tail[:, size:] == tail[:, :-size]).all(1)
        if guard.max_object_keys is not None and length >= len(self._pattern):
            windows = new.unfold(1, len(self._pattern), 1)
            loops |= (windows == self._pattern.to(new.device)).all(2).sum(1) > guard.max_object_keys
        return loops


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
        cumulative = self._warp(input_ids, scores.float()).softmax(-1).double().cumsum(-1)
        threshold = self._uniform[:, step : step + 1].to(scores.device) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, threshold, right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)
