"""The configuration scenarios of the specification."""

import pytest

from coordexp.config import RolloutContract
from tests.unit.config.trees import (
    BBOX_GEO,
    COORD_DIAG,
    COORD_REG,
    SERVER,
    TOKEN_CE,
    apply_changes,
    load,
    only_problem,
    server_mode,
    stage1,
    stage2,
)

MODULES = [TOKEN_CE, COORD_REG, BBOX_GEO]


def in_objective(module):
    return stage2(rollout_matching__pipeline={"objective": [module], "diagnostics": []})


@pytest.mark.scenario("R01.S1", on="pure")
@pytest.mark.parametrize("variant", ["stage2_rollout_aligned", "stage2_two_channel"])
def test_stage2_without_a_pipeline_is_refused(variant):
    tree = stage2(custom__trainer_variant=variant)
    if variant == "stage2_two_channel":
        tree["stage2"] = {"b_ratio": 0.5}
    del tree["rollout_matching"]["pipeline"]
    path, message = only_problem(tree)
    assert path == "rollout_matching.pipeline"
    assert "required" in message


def test_stage1_without_a_pipeline_is_refused():
    tree = stage1()
    del tree["stage1"]
    assert only_problem(tree)[0] == "stage1.pipeline"


@pytest.mark.scenario("R01.C2", on="pure")
def test_the_old_auxiliary_loss_section_is_refused():
    path, message = only_problem(stage2(custom__coord_soft_ce_w1={"enabled": True}))
    assert path == "custom.coord_soft_ce_w1"
    assert "coord_reg" in message


@pytest.mark.scenario("R22.S2", on="pure")
def test_objects_are_written_with_desc_first_unless_the_config_says_otherwise():
    orders = [load(tree).settings.custom.object_field_order for tree in (stage2(), stage1())]
    assert orders == ["desc_first", "desc_first"]
    reordered = load(stage2(custom__object_field_order="geometry_first")).settings.custom.object_field_order
    assert reordered == "geometry_first"


@pytest.mark.scenario("R02.C3", "R04.C1", on="pure")
@pytest.mark.parametrize(("module", "key"), [(m, key) for m in MODULES for key in m["config"]])
def test_a_module_config_must_state_every_key(module, key):
    rest = {name: value for name, value in module["config"].items() if name != key}
    path, message = only_problem(in_objective({**module, "config": rest}))
    assert path == f"rollout_matching.pipeline.objective[0].config.{key}"
    assert "missing" in message


@pytest.mark.scenario("R02.C2", on="pure")
@pytest.mark.parametrize("channels", [["C"], ["A", "C"], [], "A", ["B", "B"]])
def test_channels_are_a_subset_of_a_and_b(channels):
    path, _ = only_problem(in_objective({**TOKEN_CE, "channels": channels}))
    assert path.startswith("rollout_matching.pipeline.objective[0].channels")


@pytest.mark.scenario("R02.C4", "R03.C1", "R03.C2", on="pure")
@pytest.mark.parametrize("module", [*MODULES, COORD_DIAG])
def test_a_module_config_refuses_unknown_keys(module):
    entry = {**module, "config": {**module["config"], "zzz": 1.0}}
    part = "diagnostics" if module is COORD_DIAG else "objective"
    pipeline = {"objective": [TOKEN_CE], "diagnostics": [], part: [entry]}
    path, message = only_problem(stage2(rollout_matching__pipeline=pipeline))
    assert path == f"rollout_matching.pipeline.{part}[0].config.zzz"
    assert "unknown key" in message


@pytest.mark.scenario("R03.C3", on="pure")
@pytest.mark.parametrize(
    ("module", "alias", "canonical"),
    [
        (BBOX_GEO, "bbox_smoothl1_weight", "smoothl1_weight"),
        (BBOX_GEO, "bbox_ciou_weight", "ciou_weight"),
        (COORD_REG, "coord_soft_ce_weight", "soft_ce_weight"),
        (COORD_REG, "coord_w1_weight", "w1_weight"),
    ],
)
@pytest.mark.parametrize("also_canonical", [True, False])
def test_an_alias_key_is_refused_with_the_canonical_name(module, alias, canonical, also_canonical):
    config = {**module["config"], alias: 1.0}
    if not also_canonical:
        del config[canonical]
    path, message = only_problem(in_objective({**module, "config": config}))
    assert path == f"rollout_matching.pipeline.objective[0].config.{alias}"
    assert f"use {canonical}" in message


@pytest.mark.scenario("R07.S2", "R10.S8", on="pure")
@pytest.mark.parametrize("keep_list", [True, False])
@pytest.mark.parametrize(
    "old",
    [
        {"base_url": "http://127.0.0.1:8000", "group_port": 51216},
        {"base_url": ["http://127.0.0.1:8000", "http://127.0.0.1:8001"], "group_port": [51216]},
        {"base_url": ["http://127.0.0.1:8000"]},
        {"group_port": 51216},
    ],
)
def test_the_paired_list_form_of_servers_is_refused(old, keep_list):
    tree = server_mode(rollout_matching__vllm__server={**old, **({"servers": [SERVER]} if keep_list else {})})
    path, message = only_problem(tree)
    assert path == f"rollout_matching.vllm.server.{next(iter(old))}"
    assert "rollout_matching.vllm.server.servers" in message


@pytest.mark.scenario("R07.S10", on="pure")
@pytest.mark.parametrize("mode", ["adapter", "auto"])
def test_adapter_sync_with_several_learner_ranks_is_refused(mode):
    tree = server_mode(
        model__adapter={"rank": 8},
        rollout_matching__decode_batch_size=2,
        rollout_matching__vllm__sync__mode=mode,
        rollout_matching__vllm__enable_lora=True,
    )
    path, message = only_problem(tree, learners=2)
    assert path == "rollout_matching.vllm.sync.mode"
    assert "sync.mode: full" in message
    assert load(tree, learners=1).settings.rollout_matching.vllm.sync.mode == "adapter"


def servers(count):
    return [{"base_url": f"http://node-{k}:8000", "group_port": 51216} for k in range(count)]


@pytest.mark.parametrize(
    ("senders", "listed", "learners", "problem", "way_out"),
    [
        (3, 2, 8, "3 senders, but there are 2 servers", "use at most 2, or list more servers"),
        (2, 1, None, "2 senders, but there is 1 server", "use at most 1, or list more servers"),
        (3, 4, 2, "3 senders, but there are 2 learner ranks", "use at most 2, or start more learner ranks"),
        (2, 2, 1, "2 senders, but there is 1 learner rank", "use at most 1, or start more learner ranks"),
    ],
)
def test_more_senders_than_servers_or_learner_ranks_are_refused_with_a_way_out(
    senders, listed, learners, problem, way_out
):
    tree = server_mode(
        rollout_matching__decode_batch_size=8,
        rollout_matching__vllm__server={"servers": servers(listed)},
        rollout_matching__vllm__sync={"senders": senders},
    )
    path, message = only_problem(tree, learners=learners)
    assert path == "rollout_matching.vllm.sync.senders"
    assert problem in message and way_out in message


@pytest.mark.parametrize(("listed", "learners"), [(3, 3), (64, 256), (3, None)])
def test_as_many_senders_as_servers_and_learner_ranks_allow_are_accepted(listed, learners):
    tree = server_mode(
        rollout_matching__decode_batch_size=8,
        rollout_matching__vllm__server={"servers": servers(listed)},
        rollout_matching__vllm__sync={"senders": 3},
    )
    assert load(tree, learners=learners).settings.rollout_matching.vllm.sync.senders == 3


@pytest.mark.parametrize("senders", [0, -1, 1.5, "all", None])
def test_the_number_of_senders_is_a_positive_integer(senders):
    path, _ = only_problem(server_mode(rollout_matching__vllm__sync={"senders": senders}))
    assert path == "rollout_matching.vllm.sync.senders"
    assert load(server_mode()).settings.rollout_matching.vllm.sync.senders == 1


@pytest.mark.scenario("R10.C4", "R10.C7", "R10.S1", on="pure")
def test_decode_batch_size_reaches_the_rollout_settings():
    assert load(stage2(rollout_matching__decode_batch_size=4)).settings.rollout_matching.decode_batch_size == 4
    assert load(stage2()).settings.rollout_matching.decode_batch_size == 1


@pytest.mark.scenario("R10.S6", on="pure")
def test_an_unknown_rollout_key_is_refused():
    path, message = only_problem(stage2(rollout_matching__unknown_rollout_key=1))
    assert path == "rollout_matching.unknown_rollout_key"
    assert "unknown key" in message


@pytest.mark.scenario("R10.S7", on="pure")
def test_an_unknown_decoding_key_is_refused_with_its_path():
    path, _ = only_problem(stage2(rollout_matching__decoding={"unknown_decoding_key": 1}))
    assert path == "rollout_matching.decoding.unknown_decoding_key"


@pytest.mark.scenario("R10.C2", on="pure")
def test_an_unknown_key_in_a_list_entry_has_its_index():
    tree = server_mode(rollout_matching__vllm__server={"servers": [SERVER | {"unknown_flag": True}]})
    assert only_problem(tree)[0] == "rollout_matching.vllm.server.servers[0].unknown_flag"


@pytest.mark.scenario("R11.C1", "R11.S1", on="pure")
def test_the_contract_holds_every_rollout_setting_normalised():
    tree = server_mode(
        rollout_matching__decoding={"temperature": 0.7, "top_p": 0.9, "top_k": 50},
        rollout_matching__repeat_terminate={"enabled": True, "max_object_keys": 500},
        rollout_matching__vllm__sync__mode="auto",
        rollout_matching__maskiou_gate=0.4,
    )
    contract = load(tree).settings.rollout_matching_cfg
    assert isinstance(contract, RolloutContract)
    assert (contract.rollout_backend, contract.vllm.mode, contract.vllm.sync.mode) == ("vllm", "server", "full")
    assert contract.vllm.server.servers[0].group_port == 51216
    assert (contract.decode_mode, contract.decoding.top_k) == ("sampling", 50)
    assert (contract.repeat_terminate.enabled, contract.repeat_terminate.ngram_size) == (True, 64)
    assert (contract.maskiou_gate, contract.candidate_top_k) == (0.4, 10)
    assert contract.vllm.tensor_parallel_size == 1
    assert contract.vllm.max_model_len == 16000


PACKING = {"packing": True, "packing_buffer": 31, "packing_min_fill_ratio": 0.5, "packing_drop_last": True}


def with_packing(**changes):
    training = {f"training__{name}": value for name, value in PACKING.items()}
    return stage2(training__max_steps=10, **training, **changes)


@pytest.mark.scenario("R11.C1", "R11.S1", on="pure")
def test_the_contract_has_the_packing_settings_that_a_file_writes_under_training():
    contract = load(with_packing()).settings.rollout_matching_cfg
    assert {name: getattr(contract, name) for name in PACKING} == PACKING
    assert contract.packing_length == 16000


@pytest.mark.scenario("R11.C2", on="pure")
def test_the_contract_is_the_same_whichever_key_sets_the_length():
    tree = with_packing(template__max_length=16000)
    del tree["global_max_length"]
    assert load(tree).settings.rollout_matching_cfg == load(with_packing()).settings.rollout_matching_cfg


@pytest.mark.scenario("R11.C1", on="pure")
@pytest.mark.parametrize("name", [*PACKING, "packing_length"])
def test_a_file_cannot_write_the_packing_part_of_the_contract(name):
    path, message = only_problem(with_packing(**{f"rollout_matching__{name}": PACKING.get(name, 16000)}))
    assert path == f"rollout_matching.{name}"
    assert "unknown key" in message
    assert name == "packing_length" or f"did you mean training.{name}?" in message


@pytest.mark.scenario("R11.C1", on="pure")
def test_resolved_settings_load_again_and_give_the_same_contract():
    settings = load(with_packing()).settings
    again = load(settings.model_dump(mode="json")).settings
    assert again == settings
    assert again.rollout_matching_cfg == settings.rollout_matching_cfg


@pytest.mark.scenario("R13.S1", "R13.S2", on="pure")
@pytest.mark.parametrize("key", ["rollout_generate_batch_size", "rollout_infer_batch_size"])
def test_old_batch_size_keys_are_refused(key):
    path, message = only_problem(stage2(**{f"rollout_matching__{key}": 4}))
    assert path == f"rollout_matching.{key}"
    assert "rollout_matching.decode_batch_size" in message


@pytest.mark.scenario("R14.S1", "R16.S1", on="pure")
@pytest.mark.parametrize(
    ("key", "value"), [("post_rollout_pack_scope", "window"), ("rollout_buffer", {"enabled": True, "m_steps": 2})]
)
def test_removed_rollout_keys_are_refused(key, value):
    path, message = only_problem(stage2(**{f"rollout_matching__{key}": value}))
    assert path == f"rollout_matching.{key}"
    assert "remove it" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("custom.on_checkpoint", "my_package:upload"),
        ("rollout_matching.optimal_transport.max_iterations", 200),
        ("rollout_matching.optimal_transport.tolerance", 1e-6),
        ("rollout_matching.vllm.enable_prefix_caching", True),
    ],
)
def test_a_key_of_release_0_1_that_is_gone_is_refused_with_what_to_do(key, value):
    path, message = only_problem(stage2(**{key.replace(".", "__"): value}))
    assert path == key
    assert "remove it" in message


@pytest.mark.scenario("R15.S1", on="pure")
def test_more_learner_ranks_than_decoding_slots_are_refused():
    two_servers = [SERVER, {"base_url": "http://127.0.0.1:8001", "group_port": 51217}]
    tree = server_mode(rollout_matching__vllm__server={"servers": two_servers})
    path, message = only_problem(tree, learners=4)
    assert path == "rollout_matching.decode_batch_size"
    for fix in ("decode_batch_size to at least 2", "add rollout devices", "at most 2 learner ranks"):
        assert fix in message
    load(apply_changes(tree, rollout_matching__decode_batch_size=2), learners=4)


@pytest.mark.scenario("R32.C3", "R32.S1", on="pure")
@pytest.mark.parametrize("key", ["temperature", "top_p", "top_k"])
@pytest.mark.parametrize("section", ["rollout_matching", "custom.extra.rollout_matching"])
def test_sampling_keys_outside_decoding_are_refused(key, section):
    neutral = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}[key]
    path, message = only_problem(apply_changes(stage2(), **{f"{section}.{key}".replace(".", "__"): neutral}))
    assert path == f"{section}.{key}"
    assert f"rollout_matching.decoding.{key}" in message
