"""The repeat guard inside a vLLM engine, which loads it by name when it starts (`guard.ENGINE_GUARD`).

The settings come with each request (`guard.guard_arguments`). A request without settings gets those in the
engine's `additional_config`; if there are none, it is not watched. vLLM passes its whole config to the engine's
processes, so this needs no environment variable.

One class serves both of vLLM's model runners. The first (V1) reports every change of its batch, and shares each
request's list of new tokens. The second (V2, the default on GPUs) numbers requests by slots, and has their tokens
on the device. Both decide with `guard.loop_in` on the same ids.
"""

import os
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as SlotLogitsProcessor

from coordexp.rollout.guard import LOADED, EngineGuard, KeyCounter, loop_in


class RepeatGuard(LogitsProcessor, SlotLogitsProcessor):
    """Leaves a request that loops no choice but its end of turn, with the score that this token had."""

    _default: EngineGuard | None = None  # the settings of a request that carries none

    def __init__(self, vllm_config: Any, *runner: Any) -> None:
        """`runner` is (device, is_pin_memory) of V1, or (req_states,) of V2."""
        self._watched: dict[int, _WatchedRequest] = {}  # by row of the batch in V1, by slot in V2
        self._tokens: LogitsProcRequestState = runner[0]
        self._default = EngineGuard.of(vllm_config.additional_config)
        if LOADED in os.environ:  # the ms-swift plugin counts these files, to prove that all workers guard
            (Path(os.environ[LOADED]) / str(os.getpid())).touch()

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        EngineGuard.of(sampling_params.extra_args)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._watched.pop(row, None)
        for row, params, _, ids in batch_update.added:
            self._watch(row, params, ids)
        for row, other, direction in batch_update.moved:
            here, there = self._watched.pop(row, None), self._watched.pop(other, None)
            if here:
                self._watched[other] = here
            if there and direction is MoveDirectionality.SWAP:
                self._watched[row] = there

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        return self._watch(req_idx, sampling_params, [])

    def apply(self, logits: Tensor, ctx: LogitsContext | None = None) -> Tensor:
        if ctx is None:
            ends = {row: request.end_of_turn for row, request in self._watched.items() if request.loops()}
        else:
            ends = {row: request.end_of_turn for row, request, draft in self._rows(ctx) if request.loops(draft)}
        if ends:
            rows, end_of_turn = torch.tensor([[*ends], [*ends.values()]], device=logits.device)
            scores = logits[rows, end_of_turn]
            logits[rows] = -torch.inf
            logits[rows, end_of_turn] = scores
        return logits

    def _watch(self, index: int, params: SamplingParams, ids: list[int]) -> bool:
        settings = EngineGuard.of(params.extra_args) or self._default
        if settings is None or not settings.enabled:
            self._watched.pop(index, None)
            return False
        self._watched[index] = _WatchedRequest(settings, ids)
        return True

    def _rows(self, ctx: LogitsContext) -> Iterable[tuple[int, "_WatchedRequest", list[int]]]:
        """Yield the rows to look at, each with its request and the draft tokens before the row. Without such rows,
        this does not wait for the device."""
        starts = self._tokens.prompt_len.np
        batch = zip(ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist(), strict=False)
        due = {
            slot: self._watched[slot]
            for slot, length in batch
            if slot in self._watched and length - starts[slot] >= self._watched[slot].settings.min_new_tokens
        }
        if not due:
            return
        row_slots = ctx.expanded_idx_mapping.long()
        lengths = self._tokens.total_len.gpu[row_slots]
        columns = (row_slots, lengths, ctx.expanded_local_pos, ctx.input_ids)
        slots, totals, offsets, inputs = torch.stack([column.long() for column in columns]).tolist()
        self._read({slot: total for slot, total in zip(slots, totals, strict=True) if slot in due})
        for row, (slot, offset) in enumerate(zip(slots, offsets, strict=True)):
            if slot in due:
                yield row, due[slot], inputs[row - offset + 1 : row + 1]

    def _read(self, totals: dict[int, int]) -> None:
        """Read the tokens that the slots got since they were last read, in one copy from the device."""
        new = [
            (slot, place)
            for slot, total in totals.items()
            for place in range(int(self._tokens.prompt_len.np[slot]) + len(self._watched[slot].ids), total)
        ]
        if new:
            slots, places = torch.tensor(new, device=self._tokens.device).unbind(1)
            for (slot, _), id in zip(new, self._tokens.all_token_ids.gpu[slots, places].tolist(), strict=True):
                self._watched[slot].ids.append(id)


class _WatchedRequest:
    """A request and its new tokens. In V1, `ids` is vLLM's own list; tokens at its end that are not known yet are
    -1."""

    def __init__(self, settings: EngineGuard, ids: list[int]) -> None:
        self.settings, self.ids = settings, ids
        self.end_of_turn = settings.end_of_turn
        self._keys = KeyCounter(settings.key_pattern)

    def loops(self, draft: Sequence[int] = ()) -> bool:
        """Return True if the request loops with the draft tokens behind it, which vLLM may still reject."""
        ids, length = self.ids, len(self.ids)
        while length and ids[length - 1] == -1:
            length -= 1
        if length < len(ids):
            ids = ids[:length]
        keys = self._keys.count(ids)
        if draft:
            ids = [*ids, *draft]
            keys = copy(self._keys).count(ids)
        return loop_in(ids, keys, self.settings) is not None
