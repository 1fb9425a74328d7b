"""A colocated engine is sent the adapter alone, or whole weights where that cannot be. The run is told so, or it
stops if it may not fall back. The engine is a fake."""

import pytest
import torch

from coordexp.config.rollout import Offload
from coordexp.errors import EngineError
from coordexp.train.offload import offloaded
from tests.unit.config.trees import load, stage2
from tests.unit.rollout.fake_engine import ADAPTER, WEIGHTS, Run
from tests.unit.rollout.ranks import run_two_ranks

BOTH = Offload(enabled=True, offload_model=True, offload_optimizer=True)
REFUSAL = "the engine cannot use the adapter: LoRA rank 16 is greater than max_lora_rank 8"


def settled(mode: str, **more: bool) -> dict[str, object]:
    """The sync settings of a run with an adapter, as loading leaves them."""
    changes = {"model__adapter": {"rank": 8}, "rollout_matching__vllm__enable_lora": True}
    tree = stage2(**changes, rollout_matching__vllm__sync={"mode": mode, **more})
    return load(tree).settings.rollout_matching.vllm.sync.model_dump()


@pytest.mark.scenario("R07.C21", on="fake")
@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_the_adapter_alone_is_sent_and_answers_are_made_with_it(monkeypatch, mode):
    run = Run(monkeypatch, settled(mode))
    for version in (1, 2):
        run.step(version)
    assert run.started == [True]
    assert run.sent == [(1, list(ADAPTER)), (2, list(ADAPTER))]
    assert run.used == ["adapter 1", "adapter 1", "adapter 2"]  # the first is of the canary
    assert run.warnings == run.recorded == []
    assert run.backend.described() == {"sync_mode": "adapter", "fallbacks": []}


def test_whole_weights_are_sent_without_a_word_to_an_engine_without_a_place_for_adapters(monkeypatch):
    run = Run(monkeypatch, settled("full"))
    run.step(1)
    assert run.started == [False] and run.sent == [(1, list(WEIGHTS))] and run.used == [None] * 2
    assert run.warnings == [] and run.backend.described() == {"sync_mode": "full", "fallbacks": []}


@pytest.mark.scenario("R07.S4", on="fake")
def test_a_refused_adapter_turns_the_run_to_whole_weights_for_good(monkeypatch):
    run = Run(monkeypatch, settled("adapter"))
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
    assert run.recorded == [facts] and run.backend.described() == facts


@pytest.mark.scenario("R07.C23", "R07.S8", on="fake")
def test_a_refused_adapter_stops_a_run_that_may_not_fall_back_with_the_ways_out(monkeypatch):
    run = Run(monkeypatch, settled("adapter", fallback_to_full=False))
    run.refusal = REFUSAL
    with pytest.raises(EngineError) as error:
        run.step(1)
    assert str(error.value).splitlines() == [REFUSAL, WAYS_OUT]
    assert run.sent == run.warnings == run.recorded == []


@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_a_run_with_coordinate_rows_beside_its_adapter_is_told_once_that_it_gets_whole_weights(monkeypatch, mode):
    run = Run(monkeypatch, settled(mode), has_adapter=False)
    run.step(1)
    warning = (
        "warning: rollout_matching.vllm.sync.mode: an adapter alone cannot be sent, since the rows of the "
        "coordinate tokens are trained beside it, and vLLM's LoRA has no place for them "
        "(model.adapter.train_coord_rows); the whole merged weights are sent instead"
    )
    assert run.warnings == [warning]
    assert run.started == [False] and run.sent == [(1, list(WEIGHTS))]
    assert run.backend.described() == {"sync_mode": "full", "fallbacks": [warning]}


@pytest.mark.scenario("R07.S8", on="fake")
@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_a_run_with_coordinate_rows_that_may_not_fall_back_stops_with_the_ways_out(monkeypatch, mode):
    with pytest.raises(EngineError) as error:
        Run(monkeypatch, settled(mode, fallback_to_full=False), has_adapter=False)
    assert str(error.value).splitlines()[1] == WAYS_OUT


WAYS_OUT = (
    "  set rollout_matching.vllm.sync.mode: full, or sync.fallback_to_full: true, or set "
    "rollout_matching.rollout_backend: hf, which needs no engine"
)


@pytest.mark.scenario("R17.C4", "R17.S1", on="fake")
@pytest.mark.parametrize("mode", ["adapter", "full"])
def test_the_learner_is_out_of_memory_before_a_fake_engine_starts_until_it_has_answered(
    monkeypatch, tmp_path, mode
):
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
        settled(mode),
        room=lambda: offloaded(BOTH, model, optimizer, tmp_path),
        watch=lambda what: seen.append((what, memory())),
    )
    run.step(1)
    sent = "adapter" if mode == "adapter" else "whole weights"
    assert seen == [("start", 0), (sent, 0), ("answers", 0), ("answers", 0)]
    assert memory() == 3 * 64 * 64 * 4
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))


@pytest.mark.scenario("R07.C11", on="fake")
@pytest.mark.timeout(120)
def test_when_the_fake_engine_of_one_rank_refuses_the_adapter_both_ranks_send_whole_weights(tmp_path):
    """Real processes that talk by gloo. Each has an engine of its own."""
    for came_of in run_two_ranks("tests.unit.rollout.colocate_worker", tmp_path):
        assert came_of["sent"][0] == [1, list(ADAPTER)]
        assert came_of["sent"][-2:] == [[2, list(WEIGHTS)], [3, list(WEIGHTS)]]
        assert came_of["warnings"] == [f"warning: {REFUSAL}; whole weights are sent from here on"]
        assert came_of["stopped"] == f"{REFUSAL}\n{WAYS_OUT}"
        assert came_of["in step"]
