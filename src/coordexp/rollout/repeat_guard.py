"""The repeat guard inside a vLLM engine, which loads it by name when it starts (`guard.ENGINE_GUARD`).

The settings come with each request (`guard.guard_arguments`). A request without settings gets those in the
engine's `additional_config`; if there are none, it is not watched. vLLM passes its whole config to the engine's
processes, so this needs no environment variable.

One class serves both of vLLM's model runners. The first (V1) reports every change of its batch, and shares each
request's list of new tokens, to which `guard.loop_in` is applied. The second (V2, the default on GPUs) numbers
requests by slots, and has their tokens on the device. There the same decision is made on the device
(`guard.find_loops`): reading the tokens would make the host wait for the device at every token, and the engine
could not prepare the next step meanwhile.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as SlotLogitsProcessor

from coordexp.rollout.guard import EngineGuard, KeyCounter, find_loops, loop_in


class RepeatGuard(LogitsProcessor, SlotLogitsProcessor):
    """Leaves a request that loops no choice but its end of turn, with the score that this token had."""

    _default: EngineGuard | None = None  # the settings of a request that carries none

    def __init__(self, vllm_config: Any, *runner: Any) -> None:
        """`runner` is (device, is_pin_memory) of V1, or (req_states,) of V2."""
        self._watched: dict[int, _WatchedRequest] = {}  # in V1, by row of the batch
        self._slots = _WatchedSlots(runner[0]) if isinstance(runner[0], LogitsProcRequestState) else None
        self._default = EngineGuard.of(vllm_config.additional_config)

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
            self._watched.pop(row, None)
            if settings := self._read_settings(params):
                self._watched[row] = _WatchedRequest(settings, ids)
        for row, other, direction in batch_update.moved:
            here, there = self._watched.pop(row, None), self._watched.pop(other, None)
            if here:
                self._watched[other] = here
            if there and direction is MoveDirectionality.SWAP:
                self._watched[row] = there

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        assert self._slots is not None
        settings = self._read_settings(sampling_params)
        self._slots.watch(req_idx, settings)
        return settings is not None

    def apply(self, logits: Tensor, ctx: LogitsContext | None = None) -> Tensor:
        if ctx is not None:
            assert self._slots is not None
            self._slots.end_loops(logits, ctx)
            return logits
        ends = {row: request.end_of_turn for row, request in self._watched.items() if request.loops()}
        if ends:
            rows, end_of_turn = torch.tensor([[*ends], [*ends.values()]], device=logits.device)
            scores = logits[rows, end_of_turn]
            logits[rows] = -torch.inf
            logits[rows, end_of_turn] = scores
        return logits

    def _read_settings(self, params: SamplingParams) -> EngineGuard | None:
        """Return the settings with which a request is watched, or None if it is not watched."""
        settings = EngineGuard.of(params.extra_args) or self._default
        return settings if settings is not None and settings.enabled else None


class _WatchedRequest:
    """A request of V1 and its new tokens. `ids` is vLLM's own list; tokens at its end that are not known yet are
    -1."""

    def __init__(self, settings: EngineGuard, ids: list[int]) -> None:
        self.settings, self.ids = settings, ids
        self.end_of_turn = settings.end_of_turn
        self._keys = KeyCounter(settings.key_pattern)

    def loops(self) -> bool:
        ids, length = self.ids, len(self.ids)
        while length and ids[length - 1] == -1:
            length -= 1
        if length < len(ids):
            ids = ids[:length]
        return loop_in(ids, self._keys.count(ids), self.settings) is not None


class _WatchedSlots:
    """The slots of V2. Nothing here waits for the device: the host knows which settings each slot has and about
    how long its answer is, and everything else stays on the device."""

    def __init__(self, tokens: LogitsProcRequestState) -> None:
        self._tokens = tokens
        self._rules: list[EngineGuard] = []  # the different settings seen so far
        self._rule_by_slot: dict[int, int] = {}  # indices into `_rules`
        self._rules_on_device = torch.full((tokens.max_num_reqs,), -1, device=tokens.device)

    def watch(self, slot: int, settings: EngineGuard | None) -> None:
        """Watch a new request with these settings; with None, do not watch it."""
        if settings is None:
            self._rule_by_slot.pop(slot, None)
            self._rules_on_device[slot] = -1
            return
        if settings not in self._rules:
            self._rules.append(settings)
        self._rule_by_slot[slot] = self._rules.index(settings)
        self._rules_on_device[slot] = self._rule_by_slot[slot]

    def end_loops(self, logits: Tensor, ctx: LogitsContext) -> None:
        """Set the logits of all rows that loop, except that of their end of turn, to minus infinity."""
        longest = self._longest_due(ctx)
        if not longest:
            return
        slots = ctx.expanded_idx_mapping.long()
        rules = self._rules_on_device[slots]
        rows = _Rows(
            self._tokens.all_token_ids.gpu,
            slots,
            self._tokens.prompt_len.gpu[slots].long(),
            self._tokens.total_len.gpu[slots].long(),
            ctx.expanded_local_pos.long(),
            ctx.input_ids,
        )
        for rule, length in longest.items():
            settings = self._rules[rule]
            repeats, ngrams = settings.max_consecutive_token_repeats, settings.ngram_size * settings.ngram_repeats
            width = length if settings.max_object_keys is not None else min(length, max(repeats, ngrams))
            loops = find_loops(rows.tail(width), rows.lengths, settings, settings.key_pattern) & (rules == rule)
            scores = logits[:, settings.end_of_turn].clone()
            logits.masked_fill_(loops[:, None], -torch.inf)
            logits[:, settings.end_of_turn] = scores

    def _longest_due(self, ctx: LogitsContext) -> dict[int, int]:
        """Return the rules by which a request of the batch has to be checked now, each with the number of tokens
        that the longest of their answers may have."""
        starts = self._tokens.prompt_len.np
        longest: dict[int, int] = {}
        for slot, total in zip(ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist(), strict=False):
            rule, length = self._rule_by_slot.get(slot), total - int(starts[slot])
            if rule is not None and length >= self._rules[rule].min_new_tokens:
                longest[rule] = max(longest.get(rule, 0), length)
        return longest


@dataclass(frozen=True)
class _Rows:
    """The rows of a step: the tokens of all slots, and for each row its slot, the length of its prompt, the length
    of prompt and committed answer, and the number of draft tokens behind them. The drafts of a row are the
    `inputs` of the rows up to it."""

    ids: Tensor
    slots: Tensor
    prompt_lengths: Tensor
    totals: Tensor
    drafts: Tensor
    inputs: Tensor

    @property
    def lengths(self) -> Tensor:
        """The length of each row's answer."""
        return self.totals + self.drafts - self.prompt_lengths

    def tail(self, width: int) -> Tensor:
        """Return the last `width` tokens of each answer: [rows, width]. Places before its first token are -1."""
        device = self.slots.device
        back = torch.arange(width - 1, -1, -1, device=device)
        rows = torch.arange(len(self.slots), device=device)[:, None]
        drafted = self.inputs[(rows - back).clamp(min=0)]
        places = (self.totals + self.drafts)[:, None] - 1 - back
        places = torch.minimum(places, self.totals[:, None] - 1).clamp(min=0)
        committed = self.ids[self.slots[:, None], places]
        tail = torch.where(back < self.drafts[:, None], drafted.long(), committed.long())
        return tail.masked_fill(back >= self.lengths[:, None], -1)
