"""Adapters cannot be sent alone: the run sends whole weights and says so, or stops where it was told not to."""

from types import SimpleNamespace

import pytest

from coordexp.config.rollout import Sync
from coordexp.errors import EngineError
from coordexp.rollout.colocate import ColocateBackend, instead_of_adapters
from tests.unit.config.trees import load, stage2

ADAPTER = {"model__adapter": {"rank": 8}, "rollout_matching__vllm__enable_lora": True}


def test_whole_weights_are_sent_without_a_word():
    assert instead_of_adapters(Sync()) is None


@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_a_run_that_asks_for_adapters_is_told_once_that_it_gets_whole_weights(mode):
    settings = load(stage2(**ADAPTER, rollout_matching__vllm__sync={"mode": mode})).settings
    said: list[str] = []
    ColocateBackend(SimpleNamespace(settings=settings.rollout_matching), None, None, None, None, said.append)
    assert said == [
        "warning: rollout_matching.vllm.sync.mode: an adapter alone cannot be sent, since the rows of the "
        "coordinate tokens are trained beside it, and vLLM's LoRA has no place for them; the whole merged "
        "weights are sent instead"
    ]


@pytest.mark.scenario("R07.S8")
@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_a_run_that_may_not_fall_back_stops_with_the_ways_out(mode):
    sync = {"mode": mode, "fallback_to_full": False}
    settings = load(stage2(**ADAPTER, rollout_matching__vllm__sync=sync)).settings
    with pytest.raises(EngineError) as error:
        instead_of_adapters(settings.rollout_matching.vllm.sync)
    assert str(error.value).splitlines()[1] == (
        "  set sync.mode: full, or sync.fallback_to_full: true, or set rollout_matching.rollout_backend: hf, "
        "which needs no engine"
    )
