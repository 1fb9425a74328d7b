"""A colocated engine gets the adapter alone, or whole weights if that is impossible. The run then warns, or stops
if it may not fall back. The engine is a fake."""

import pytest
import torch

from coordexp.config.rollout import Offload
from coordexp.errors import EngineError
from coordexp.train.offload import offload_learner
from tests.unit.config.trees import load, stage2
from tests.unit.rollout.fake_engine import ADAPTER, WEIGHTS, Run
from tests.unit.rollout.ranks import run_ranks

BOTH = Offload(enabled=True, offload_model=True, offload_optimizer=True)
REFUSAL = "the engine cannot use the adapter: LoRA rank 16 is greater than max_lora_rank 8"


def sync_settings(mode: str, **more: bool) -> dict[str, object]:
    """Return the sync settings of a run with an adapter after its config was loaded."""
    changes = {"model__adapter": {"rank": 8}, "rollout_matching__vllm__enable_lora": True}
    tree = stage2(**changes, rollout_matching__vllm__sync={"mode": mode, **more})
    return load(tree).settings.rollout_matching.vllm.sync.model_dump()


@pytest.mark.scenario("R07.C21", on="fake")
@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_the_adapter_alone_is_sent_and_answers_are_made_with_it(monkeypatch, mode):
    run = Run(monkeypatch, sync_settings(mode))
    for version in (1, 2):
        run.step(version)
    assert run.started == [True]
    assert run.sent == [(1, list(ADAPTER)), (2, list(ADAPTER))]
    assert run.used == ["adapter 1", "adapter 1", "adapter 2"]  # the first one is for the canary
    assert run.warnings == run.recorded == []
    assert run.backend.describe() == {"sync_mode": "adapter", "fallbacks": []}


@pytest.mark.scenario("R07.S4", on="fake")
def test_after_a_refused_adapter_the_run_sends_whole_weights_for_good(monkeypatch):
    run = Run(monkeypatch, sync_settings("adapter"))
    run.step(1)
    run.refusal = REFUSAL
    run.step(2)
    run.refusal = ""
    run.step(3)
    assert run.sent == [(1, list(ADAPTER)), (2, list(WEIGHTS)), (3, list(WEIGHTS))]
    assert run.used == ["adapter 1", "adapter 1", None, None]
    warning = f"warning: {REFUSAL}; whole weights are sent from here on"
    assert run.warnings == [warning]
    facts = {"sync_mode": "full", "fallbacks": [warning]}
    assert run.recorded == [facts] and run.backend.describe() == facts


@pytest.mark.scenario("R07.C23", "R07.S8", on="fake")
def test_a_refused_adapter_stops_a_run_that_may_not_fall_back_with_the_ways_out(monkeypatch):
    run = Run(monkeypatch, sync_settings("adapter", fallback_to_full=False))
    run.refusal = REFUSAL
    with pytest.raises(EngineError) as error:
        run.step(1)
    assert str(error.value).splitlines() == [REFUSAL, WAYS_OUT]
    assert run.sent == run.warnings == run.recorded == []


@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_a_run_that_also_trains_coordinate_rows_warns_once_that_it_sends_whole_weights(monkeypatch, mode):
    run = Run(monkeypatch, sync_settings(mode), has_adapter=False)
    run.step(1)
    warning = (
        "warning: rollout_matching.vllm.sync.mode: an adapter alone cannot be sent, since the rows of the "
        "coordinate tokens are trained beside it, and vLLM's LoRA has no place for them "
        "(model.adapter.train_coord_rows); the whole merged weights are sent instead"
    )
    assert run.warnings == [warning]
    assert run.started == [False] and run.sent == [(1, list(WEIGHTS))]
    assert run.backend.describe() == {"sync_mode": "full", "fallbacks": [warning]}


@pytest.mark.scenario("R07.S8", on="fake")
@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_a_run_with_coordinate_rows_that_may_not_fall_back_stops_with_the_ways_out(monkeypatch, mode):
    with pytest.raises(EngineError) as error:
        Run(monkeypatch, sync_settings(mode, fallback_to_full=False), has_adapter=False)
    assert str(error.value).splitlines()[1] == WAYS_OUT


WAYS_OUT = (
    "  set rollout_matching.vllm.sync.mode: full, or sync.fallback_to_full: true, or set "
    "rollout_matching.rollout_backend: hf (in Stage 1: stage1.eval_backend: hf), which needs no engine"
)


@pytest.mark.scenario("R17.C4", "R17.S1", on="fake")
@pytest.mark.parametrize("mode", ["adapter", "full"])
def test_the_learner_is_out_of_memory_before_a_fake_engine_starts_until_it_has_answered(monkeypatch, mode):
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    slot = optimizer.state[model.weight]
    tensors = [model.weight, slot["exp_avg"], slot["exp_avg_sq"]]
    before = [tensor.detach().clone() for tensor in tensors]
    seen: list[tuple[str, int]] = []

    def memory() -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    run = Run(
        monkeypatch,
        sync_settings(mode),
        room=lambda: offload_learner(BOTH, model, optimizer),
        watch=lambda event: seen.append((event, memory())),
    )
    run.step(1)
    sent = "adapter" if mode == "adapter" else "whole weights"
    assert seen == [("start", 0), (sent, 0), ("answers", 0), ("answers", 0)]
    assert memory() == 3 * 64 * 64 * 4
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))


@pytest.mark.scenario("R07.C11", on="fake")
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_when_the_fake_engine_of_one_rank_refuses_the_adapter_both_ranks_send_whole_weights(tmp_path):
    """The ranks are real processes that communicate with gloo. Each has an engine of its own."""
    for result in run_ranks("tests.unit.rollout.colocate_worker", tmp_path):
        assert result["sent"][0] == [1, list(ADAPTER)]
        assert result["sent"][-2:] == [[2, list(WEIGHTS)], [3, list(WEIGHTS)]]
        assert result["warnings"] == [f"warning: {REFUSAL}; whole weights are sent from here on"]
        assert result["stopped"] == f"{REFUSAL}\n{WAYS_OUT}"
        assert result["in step"]
