"""The defaults that the specification states, and those that it leaves open (D8, D17, D25)."""

import pytest

from tests.unit.config.trees import load, stage1, stage2


@pytest.fixture
def rollout():
    """Return the `rollout_matching` section of a config that sets only the pipeline, with one learner."""
    return load(stage2()).settings.rollout_matching


@pytest.mark.scenario("R07.C2", "R07.C4", "R07.C7", on="pure")
def test_rollouts_come_from_a_colocated_vllm_engine(rollout):
    assert rollout.rollout_backend == "vllm"
    assert rollout.vllm.mode == "colocate"
    assert rollout.vllm.gpu_memory_utilization == 0.45
    assert rollout.vllm.enable_lora is False


def test_all_held_out_records_are_evaluated():
    assert load(stage1()).settings.custom.eval_samples is None


@pytest.mark.scenario("R34.C1", on="pure")
def test_the_repeat_guard_is_off_and_has_these_limits(rollout):
    assert rollout.repeat_terminate.model_dump() == {
        "enabled": False,
        "min_new_tokens": 256,
        "max_consecutive_token_repeats": 64,
        "ngram_size": 64,
        "ngram_repeats": 2,
        "max_object_keys": None,
    }


@pytest.mark.scenario("R27.C2", on="pure")
def test_ten_candidates_are_matched_above_a_mask_iou_of_0_3_at_equal_costs(rollout):
    assert rollout.candidate_top_k == 10
    assert rollout.maskiou_gate == 0.3
    assert (rollout.fp_cost, rollout.fn_cost) == (1.0, 1.0)
    assert rollout.maskiou_resolution == 256
