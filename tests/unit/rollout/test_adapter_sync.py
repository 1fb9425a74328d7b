"""Where an adapter cannot be sent alone, whole weights are, and the run is told so, or stops if it may not."""

from types import SimpleNamespace

import pytest

from coordexp.config.rollout import Sync
from coordexp.errors import EngineError
from coordexp.rollout.adapter_fallback import COLOCATED, COORD_ROWS, instead_of_adapters
from coordexp.rollout.colocate import ColocateBackend
from tests.unit.config.trees import load, stage2

ADAPTER = {"model__adapter": {"rank": 8}, "rollout_matching__vllm__enable_lora": True}


def test_whole_weights_are_sent_without_a_word():
    assert instead_of_adapters(Sync(), COORD_ROWS) is None


@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_a_run_that_asks_for_adapters_is_told_once_that_it_gets_whole_weights(mode):
    settings = load(stage2(**ADAPTER, rollout_matching__vllm__sync={"mode": mode})).settings
    said: list[str] = []
    ColocateBackend(SimpleNamespace(settings=settings.rollout_matching), None, None, None, None, said.append)
    assert said == [
        "warning: rollout_matching.vllm.sync.mode: an adapter alone cannot be sent, since an engine beside the "
        "learner gets whole weights, by memory that both see; the whole merged weights are sent instead"
    ]


@pytest.mark.scenario("R07.S8")
@pytest.mark.parametrize("because", [COLOCATED, COORD_ROWS])
@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_a_run_that_may_not_fall_back_stops_with_the_ways_out(mode, because):
    sync = {"mode": mode, "fallback_to_full": False}
    settings = load(stage2(**ADAPTER, rollout_matching__vllm__sync=sync)).settings
    with pytest.raises(EngineError) as error:
        instead_of_adapters(settings.rollout_matching.vllm.sync, because)
    assert str(error.value).splitlines()[1] == (
        "  set sync.mode: full, or sync.fallback_to_full: true, or set rollout_matching.rollout_backend: hf, "
        "which needs no engine"
    )
