"""The defaults that the specification states, and those that it leaves open (D8, D17, D25)."""

import pytest

from tests.unit.config.trees import SERVER, load, server_mode, stage1, stage2


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


@pytest.mark.scenario("R07.C7", on="pure")
def test_four_learners_share_an_engine_of_tensor_parallel_size_four():
    assert load(stage2(), learners=4).settings.rollout_matching.vllm.tensor_parallel_size == 4


@pytest.mark.scenario("R07.C18", "R07.C19", on="pure")
def test_full_weights_are_synced_and_an_adapter_sync_falls_back_to_them(rollout):
    assert rollout.vllm.sync.mode == "full"
    assert rollout.vllm.sync.fallback_to_full is True


@pytest.mark.scenario("R07.C13", "R07.C14", on="pure")
def test_a_server_has_240_seconds_to_be_reachable_and_no_time_limit_for_answers():
    settings = load(server_mode(rollout_matching__vllm__server={"servers": [SERVER]})).settings
    pool = settings.rollout_matching.vllm.server
    assert pool.timeout_s == 240.0
    assert pool.infer_timeout_s is None
    assert pool.hung_after_s == 60.0


@pytest.mark.scenario("R10.C7", on="pure")
@pytest.mark.parametrize("tree", [stage1(), stage2(), server_mode()])
def test_one_sequence_is_decoded_at_once(tree):
    assert load(tree).settings.rollout_matching.decode_batch_size == 1


def test_all_held_out_records_are_evaluated():
    assert load(stage1()).settings.custom.eval_samples is None


@pytest.mark.scenario("R17.C1", on="pure")
def test_nothing_is_offloaded(rollout):
    assert rollout.offload.model_dump() == {"enabled": False, "offload_model": False, "offload_optimizer": False}


@pytest.mark.scenario("R32.C1", on="pure")
def test_decoding_is_greedy_over_all_tokens(rollout):
    assert rollout.decoding.model_dump() == {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    assert (rollout.decode_mode, rollout.num_beams) == ("greedy", None)


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
