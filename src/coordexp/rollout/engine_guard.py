"""The repeat guard inside a vLLM engine. It is loaded by name when the engine starts (`guard.ENGINE_GUARD`), and
what it looks for comes with each request (`guard.guard_arguments`). A request without settings gets those of
`_default`, if the class has any; otherwise it is not watched.

One class serves both of vLLM's model runners. The first (V1) tells of every change of its batch, and shares each
request's list of new tokens. The second (V2, the default on GPUs) numbers requests by slots, and has their tokens
on the device. The decision is `guard.loop_in` on the same ids in both.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as SlotLogitsProcessor

from coordexp.rollout.guard import EngineGuard, KeyCounter, loop_in


class RepeatGuard(LogitsProcessor, SlotLogitsProcessor):
    """Where a request loops, nothing but its end of turn is left to choose, with the score that it had."""

    _default: EngineGuard | None = None  # the settings of a request that carries none

    def __init__(self, vllm_config: Any, *runner: Any) -> None:
        """`runner` is (device, is_pin_memory) of V1, or (req_states,) of V2."""
        self._watched: dict[int, _Watched] = {}  # by row of the batch in V1, by slot in V2
        self._tokens: LogitsProcRequestState = runner[0]

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
            ends = {row: one.end_of_turn for row, one in self._watched.items() if one.loops()}
        else:
            ends = {row: one.end_of_turn for row, one, drafted in self._rows(ctx) if one.loops(drafted)}
        if ends:
            rows, end_of_turn = torch.tensor([[*ends], [*ends.values()]], device=logits.device)
            own = logits[rows, end_of_turn]
            logits[rows] = -torch.inf
            logits[rows, end_of_turn] = own
        return logits

    def _watch(self, index: int, params: SamplingParams, ids: list[int]) -> bool:
        settings = EngineGuard.of(params.extra_args) or self._default
        if settings is None or not settings.enabled:
            self._watched.pop(index, None)
            return False
        self._watched[index] = _Watched(settings, ids)
        return True

    def _rows(self, ctx: LogitsContext) -> Iterable[tuple[int, "_Watched", list[int]]]:
        """The rows to look at, with their request and what was drafted of it before the row. Whether there are
        any is known without waiting for the device."""
        starts = self._tokens.prompt_len.np
        batch = zip(ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist(), strict=False)
        due = {
            slot: self._watched[slot]
            for slot, most in batch
            if slot in self._watched and most - starts[slot] >= self._watched[slot].settings.min_new_tokens
        }
        if not due:
            return
        of_rows = ctx.expanded_idx_mapping.long()
        lengths = self._tokens.total_len.gpu[of_rows]
        told = (of_rows, lengths, ctx.expanded_local_pos, ctx.input_ids)
        slots, totals, offsets, inputs = torch.stack([one.long() for one in told]).tolist()
        self._read({slot: total for slot, total in zip(slots, totals, strict=True) if slot in due})
        for row, (slot, offset) in enumerate(zip(slots, offsets, strict=True)):
            if slot in due:
                yield row, due[slot], inputs[row - offset + 1 : row + 1]

    def _read(self, totals: dict[int, int]) -> None:
        """The tokens that slots have got since they were last read, in one copy from the device."""
        new = [
            (slot, place)
            for slot, total in totals.items()
            for place in range(int(self._tokens.prompt_len.np[slot]) + len(self._watched[slot].ids), total)
        ]
        if new:
            slots, places = torch.tensor(new, device=self._tokens.device).unbind(1)
            for (slot, _), id in zip(new, self._tokens.all_token_ids.gpu[slots, places].tolist(), strict=True):
                self._watched[slot].ids.append(id)


class _Watched:
    """A request. `ids` are its new tokens: V1's own list, which may end in -1 where one is not known yet."""

    def __init__(self, settings: EngineGuard, ids: list[int]) -> None:
        self.settings, self.ids = settings, ids
        self.end_of_turn = settings.end_of_turn
        self._keys = KeyCounter(settings.key_pattern)

    def loops(self, drafted: Sequence[int] = ()) -> bool:
        """Whether it does with the drafted tokens behind it, which may yet be rejected."""
        ids, known = self.ids, len(self.ids)
        while known and ids[known - 1] == -1:
            known -= 1
        if known < len(ids):
            ids = ids[:known]
        keys = self._keys.count(ids)
        if drafted:
            ids = [*ids, *drafted]
            keys = copy(self._keys).count(ids)
        return loop_in(ids, keys, self.settings) is not None
