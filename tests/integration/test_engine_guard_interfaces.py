"""The engine's repeat guard through both of vLLM's interfaces, without an engine: which requests it watches, which
tokens it reads, and that it agrees with the pure function after every token."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, _load_custom_logitsprocs, _load_logitsprocs_by_fqcns
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_by_fqcns

from coordexp.config.rollout import RepeatTerminate
from coordexp.rollout.guard import ENGINE_GUARD, count_keys, guard_arguments, loop_in
from coordexp.rollout.repeat_guard import RepeatGuard
from tests.unit.rollout.test_guard import guard

VOCABULARY, STOP = 12, 11
CONFIG = SimpleNamespace(additional_config={})  # the part of vLLM's config that the guard reads


THRICE = guard(max_consecutive_token_repeats=3)


def params(rule: RepeatTerminate | None = THRICE, pattern=(), stop: int = STOP) -> SamplingParams:
    return SamplingParams(extra_args=guard_arguments(rule, pattern, stop) if rule else None)


def scores(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows))


def looping(before: torch.Tensor, after: torch.Tensor, stop: int = STOP) -> list[bool]:
    """Return for each row whether only its end of turn is left. All other scores must be unchanged."""
    ended = []
    for row, untouched in zip(after, before, strict=True):
        ended.append(not torch.equal(row, untouched))
        expected = torch.full_like(untouched, -torch.inf) if ended[-1] else untouched.clone()
        expected[stop] = untouched[stop]
        assert torch.equal(row, expected)
    return ended


class FirstRunner:
    """Reports its requests to the guard as vLLM's V1 runner does. Prompts loop, which must not count. How it moves
    and replaces them, a real engine shows (test_engine_guard.py)."""

    def __init__(self) -> None:
        self.guard = RepeatGuard(CONFIG, torch.device("cpu"), False)

    def add(self, *requests) -> None:
        added = [(row, sampling, [0] * 9, ids) for row, sampling, ids in requests]
        self.guard.update_state(BatchUpdate(8, [], added, []))

    def looping(self, rows: int) -> list[bool]:
        before = scores(rows)
        return looping(before, self.guard.apply(before.clone()))


class FakeBuffer:
    """One of the V2 runner's buffers per slot, in plain memory."""

    def __init__(self, *size: int) -> None:
        self.gpu = torch.zeros(size, dtype=torch.int32)
        self.np = self.gpu.numpy()


class FakeSecondRunner:
    """Has slots and rows like vLLM's V2 runner, in fake buffers."""

    def __init__(self, slots: int = 5, longest: int = 200) -> None:
        self.tokens, self.prompt, self.total = FakeBuffer(slots, longest), FakeBuffer(slots), FakeBuffer(slots)
        self.tokens.np[:] = 7  # left from earlier requests
        state = LogitsProcRequestState(
            device=torch.device("cpu"),
            max_num_reqs=slots,
            vocab_size=VOCABULARY,
            all_token_ids=self.tokens,
            prompt_len=self.prompt,
            prefill_len=self.prompt,
            total_len=self.total,
        )
        self.guard = RepeatGuard(CONFIG, state)

    def add(self, slot: int, sampling: SamplingParams, prompt=(7, 7, 7), resumed=()) -> bool:
        self.prompt.np[slot], self.total.np[slot] = len(prompt), len(prompt)
        self.tokens.np[slot, : len(prompt)] = prompt
        self.commit(slot, resumed)
        return self.guard.add_request(slot, sampling)

    def commit(self, slot: int, ids) -> None:
        total = int(self.total.np[slot])
        self.tokens.np[slot, total : total + len(ids)] = ids
        self.total.np[slot] += len(ids)

    def looping(self, slots, drafts=None) -> list[bool]:
        drafts = drafts or {}
        rows = [(slot, k) for slot in slots for k in range(1 + len(drafts.get(slot, ())))]
        inputs = [([self.tokens.np[slot, self.total.np[slot] - 1], *drafts.get(slot, ())])[k] for slot, k in rows]
        most = [int(self.total.np[slot]) + len(drafts.get(slot, ())) for slot in slots]
        batch = LogitsContext(
            expanded_idx_mapping=torch.tensor([slot for slot, _ in rows], dtype=torch.int32),
            idx_mapping=torch.tensor(list(slots), dtype=torch.int32),
            idx_mapping_np=np.array(list(slots), dtype=np.int32),
            expanded_local_pos=torch.tensor([k for _, k in rows], dtype=torch.int32),
            input_ids=torch.tensor(np.array(inputs), dtype=torch.int32),
            pos=torch.tensor([int(self.total.np[slot]) - 1 + k for slot, k in rows]),
            seq_lens_upper_bound_np=np.array([*most, 0, 0], dtype=np.int32),  # padded, like a real one
        )
        before = scores(len(rows))
        return looping(before, self.guard.apply(before.clone(), batch))


def test_both_of_vllms_loaders_take_the_class_by_its_name():
    assert _load_logitsprocs_by_fqcns([ENGINE_GUARD]) == [RepeatGuard]
    assert RepeatGuard in _load_custom_logitsprocs([ENGINE_GUARD])
    assert _load_v2_logitsprocs_by_fqcns([ENGINE_GUARD]) == [RepeatGuard]


def test_each_request_ends_with_its_own_end_of_turn():
    runner, before = FirstRunner(), scores(3)
    runner.add(*((row, params(stop=row + 4), [7] * 3) for row in range(3)))
    after = runner.guard.apply(before.clone())
    assert [row.isfinite().nonzero().flatten().tolist() for row in after] == [[4], [5], [6]]
    assert torch.equal(after.diagonal(4)[:3], before.diagonal(4)[:3])


def test_a_slot_that_is_used_again_has_only_its_new_request():
    runner = FakeSecondRunner()
    runner.add(1, params())
    runner.commit(1, [7] * 3)
    assert runner.looping([1]) == [True]
    runner.add(1, params())
    assert runner.looping([1]) == [False]
    runner.commit(1, [7] * 3)
    assert runner.looping([1]) == [True]
    assert not runner.add(1, params(None))
    runner.commit(1, [7] * 3)
    assert runner.looping([1]) == [False]


def test_a_resumed_request_comes_with_the_tokens_that_it_had_written():
    runner = FakeSecondRunner()
    runner.add(2, params(guard(max_object_keys=2), (5,)), resumed=[5, 1, 5])
    assert runner.looping([2]) == [False]
    runner.commit(2, [5])
    assert runner.looping([2]) == [True]


def test_keys_in_the_prompt_of_a_shorter_answer_are_not_counted():
    """All rows of a step are read back to the length of the longest answer."""
    runner = FakeSecondRunner()
    rule = params(guard(max_object_keys=1), (5,))
    runner.add(0, rule)
    runner.add(1, rule, prompt=(5, 5, 5))
    runner.commit(0, [1, 2, 3, 4, 5])
    runner.commit(1, [5])
    assert runner.looping([0, 1]) == [False, False]
    runner.commit(1, [5])
    assert runner.looping([0, 1]) == [False, True]


def test_rows_stand_for_slots_in_any_order():
    runner = FakeSecondRunner()
    for slot, rule in ((0, THRICE), (1, None), (2, THRICE), (4, THRICE)):
        runner.add(slot, params(rule))
        runner.commit(slot, [7] * 3 if slot != 2 else [7, 7, 1])
    assert runner.looping([0, 1, 2, 4]) == [True, False, False, True]
    assert runner.looping([4, 2, 1, 0]) == [True, False, False, True]
    assert runner.looping([2, 4]) == [False, True]
    assert runner.looping([1, 2]) == [False, False]


class NoWaiting(TorchDispatchMode):
    """Fails where the host would wait for a GPU: if a value or a shape that depends on values is read, or if data
    is moved between the host and the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique"), name
        assert name != "index" or not any(index.dtype == torch.bool for index in args[1] if index is not None), (
            "indexed by a mask"
        )
        assert "device" not in (kwargs or {}) or name not in ("_to_copy", "copy_"), name
        return func(*args, **(kwargs or {}))


def read_a_value(*_):
    raise AssertionError("the host reads a tensor")


@pytest.mark.parametrize("drafts", [{}, {1: [7, 7]}])
def test_the_guard_never_waits_for_the_device(monkeypatch, drafts):
    """Without a request that is due, it does not even start work on the device."""
    runner = FakeSecondRunner()
    rule = guard(max_consecutive_token_repeats=3, max_object_keys=5, min_new_tokens=8)
    runner.add(0, params(None))
    runner.add(1, params(rule, (5, 6)))
    apply, verdicts, operations = runner.guard.apply, [], []

    def watched(logits, batch):
        with NoWaiting() as device, monkeypatch.context() as patch:
            for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__index__"):
                patch.setattr(torch.Tensor, name, read_a_value)
            after = apply(logits, batch)
        operations.append(device.operations)
        return after

    monkeypatch.setattr(runner.guard, "apply", watched)
    for _ in range(10):
        verdicts.append(runner.looping([0, 1], drafts)[-1])
        runner.commit(1, [7])
    due = 8 - len(drafts.get(1, ()))
    assert verdicts == [False] * due + [True] * (10 - due)
    assert operations[:due] == [0] * due and all(operations[due:])


rules = st.builds(
    guard,
    min_new_tokens=st.integers(0, 8),
    max_consecutive_token_repeats=st.integers(2, 5),
    ngram_size=st.integers(1, 4),
    ngram_repeats=st.integers(2, 3),
    max_object_keys=st.none() | st.integers(1, 3),
)
patterns = st.lists(st.integers(0, 2), min_size=1, max_size=3)
sequences = st.lists(st.integers(0, 2) | st.integers(0, 10), max_size=60)


@pytest.mark.scenario("R33.C1", on="fake")
@given(rules, patterns, sequences, st.integers(0, 2), st.lists(st.integers(0, 60)))
@settings(deadline=None)
def test_after_every_token_the_guard_of_the_first_runner_agrees_with_the_pure_function(
    rule, pattern, ids, unknown, again
):
    """The engine may also take tokens back."""
    runner, live = FirstRunner(), [-1] * unknown
    runner.add((0, params(rule, pattern), live))
    for end in [*range(len(ids) + 1), *again]:
        live[:] = [*ids[:end], *[-1] * unknown]
        expected = loop_in(ids[:end], count_keys(ids[:end], pattern), rule) is not None
        assert runner.looping(1) == [expected]


@given(rules, patterns, sequences, st.data())
@settings(deadline=None)
def test_after_every_token_the_guard_of_the_second_runner_agrees_with_the_pure_function(rule, pattern, ids, data):
    """It also agrees behind correct and wrong draft tokens. The prompt itself loops, which must not count."""
    runner, end = FakeSecondRunner(), 0
    runner.add(0, params(rule, pattern), prompt=[0] * 9)
    while True:
        right = ids[end : end + data.draw(st.integers(0, 3))]
        drafts = [*right, *data.draw(st.lists(st.integers(0, 2), max_size=2))]
        written = [[*ids[:end], *drafts[:count]] for count in range(len(drafts) + 1)]
        expected = [loop_in(row, count_keys(row, pattern), rule) is not None for row in written]
        assert runner.looping([0], {0: drafts}) == expected
        if end == len(ids):
            break
        taken = ids[end : end + data.draw(st.integers(1, len(right) + 1))]
        runner.commit(0, taken)
        end += len(taken)
