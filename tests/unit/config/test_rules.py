"""Rules between settings: each refuses what it must and accepts the valid config next to it."""

import json

import pytest
import yaml

from coordexp.config import load_settings, parse_settings
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


def rollout(**changes):
    """Return a valid Stage 2 config with these changes under `rollout_matching`."""
    return stage2(**{f"rollout_matching__{key}": value for key, value in changes.items()})


def with_evaluation(**changes):
    return stage2(custom__val_jsonl="val.jsonl", training__eval_strategy="steps", **changes)


def evaluating_with_vllm(**changes):
    """Return a Stage 1 config whose evaluation starts an engine, with these changes under `rollout_matching`."""
    tree = stage1(custom__val_jsonl="val.jsonl", training__eval_strategy="steps", stage1__eval_backend="vllm")
    return apply_changes(tree, rollout_matching={"rollout_backend": "hf"} | changes)


def test_the_valid_configs_load_without_notes():
    for tree in (stage1(), stage2(), server_mode()):
        assert load(tree).notes == ()


@pytest.mark.scenario("R06.C3", on="pure")
@pytest.mark.parametrize(
    ("tree", "path", "expected"),
    [
        (rollout(decode_mode="beam", num_beams=4), "rollout_matching.decode_mode", "rollout_backend: hf"),
        (rollout(num_beams=4), "rollout_matching.num_beams", "decode_mode: beam"),
        (
            rollout(decode_mode="beam", rollout_backend="hf", num_beams=4, decode_batch_size=3),
            "rollout_matching.num_beams",
            "raise decode_batch_size",
        ),
        (stage2(training__gradient_accumulation_steps=513), "training.gradient_accumulation_steps", "at most 512"),
        (
            rollout(decode_mode="beam", rollout_backend="hf"),
            "rollout_matching.num_beams",
            "add e.g. num_beams: 4",
        ),
        (rollout(rollouts_per_sample=4), "rollout_matching.rollouts_per_sample", "set decoding.temperature"),
        (
            rollout(rollouts_per_sample=2, decoding={"temperature": 0.7}, choice={"rule": "union", "votes": 3}),
            "rollout_matching.choice.votes",
            "at most 2",
        ),
        (
            rollout(choice={"pseudo_labels": True}),
            "rollout_matching.choice.pseudo_labels",
            "choice.rule: union",
        ),
        (
            stage2(
                rollout_matching__rollouts_per_sample=8,
                rollout_matching__decoding={"temperature": 0.7},
                training__per_device_train_batch_size=512,
            ),
            "training.per_device_train_batch_size",
            "at most 511",
        ),
        (rollout(decode_mode="sampling"), "rollout_matching.decode_mode", "temperature above 0"),
        (
            rollout(rollout_backend="vllm", decoding={"temperature": 0.001}),
            "rollout_matching.decoding.temperature",
            "0.01 or more",
        ),
        (
            rollout(decode_mode="greedy", decoding={"temperature": 0.5}),
            "rollout_matching.decoding.temperature",
            "decode_mode: sampling",
        ),
        (rollout(decoding={"top_k": 0}), "rollout_matching.decoding.top_k", "-1 or an integer >= 1"),
        (rollout(vllm={"sync": {"mode": "adapter"}}), "rollout_matching.vllm.sync.mode", "enable_lora: true"),
        (rollout(max_new_tokens=16000), "rollout_matching.max_new_tokens", "less than 16000"),
        (stage2(training__packing=True), "training.max_steps", "max_steps: 2000"),
        (stage2(training__eval_on_start=True), "training.eval_on_start", "eval_strategy: steps"),
        (stage2(training__save_strategy="best"), "training.save_strategy", "eval_strategy: steps"),
        (
            with_evaluation(training__lr_scheduler_type="reduce_lr_on_plateau"),
            "training.metric_for_best_model",
            "metric_for_best_model: f1_50",
        ),
        (with_evaluation(training__metric_for_best_model="loss"), "training.metric_for_best_model", "e.g."),
        (stage2(training__include_num_input_tokens_seen="some"), "training.include_num_input_tokens_seen", "e.g."),
        (
            stage2(training__train_sampling_strategy="group_by_length"),
            "training.train_sampling_strategy",
            "e.g.",
        ),
        (stage2(stage2__b_ratio=0.5), "stage2.b_ratio", "stage2_two_channel"),
        (stage2(custom__trainer_variant="stage2_two_channel"), "stage2.b_ratio", "b_ratio: 0.5"),
        (stage2(template__max_length=8000), "template.max_length", "the same number"),
        (stage2(training__eval_strategy="steps"), "custom.val_jsonl", "eval_strategy: no"),
        (
            stage2(custom__trainer_variant="rollout_matching_sft"),
            "custom.trainer_variant",
            "stage2_rollout_aligned",
        ),
        (stage2(custom__trainer_variant="nonsense"), "custom.trainer_variant", "one of stage1_sft"),
        (rollout(vllm={"mode": "server"}), "rollout_matching.vllm.server.servers", "vllm.mode: colocate"),
        (stage2(training__warmup_ratio=0.1), "training.warmup_ratio", "warmup_steps"),
        (stage2(training__hub_token="x"), "training.hub_token", "HF_TOKEN"),
    ],
)
def test_a_conflict_is_one_message_with_a_fix(tree, path, expected):
    if "sync" in path:
        tree = apply_changes(tree, model__adapter={"rank": 8})
    wrong_path, message = only_problem(tree)
    assert wrong_path == path
    assert expected in message


@pytest.mark.scenario("R06.C3", on="pure")
def test_packing_needs_packing_drop_last_since_nothing_is_trained_after_the_last_step():
    tree = stage2(training__packing=True, training__max_steps=10)
    path, message = only_problem(apply_changes(tree, training__packing_drop_last=False))
    assert path == "training.packing_drop_last"
    assert "set packing_drop_last: true" in message
    load(apply_changes(tree, training__packing_drop_last=True))


@pytest.mark.scenario("R06.S4", on="pure")
def test_a_buffer_that_cannot_hold_one_micro_batch_is_refused_at_load():
    tree = stage2(training__packing=True, training__packing_buffer=4, training__max_steps=10)
    path, message = only_problem(apply_changes(tree, training__per_device_train_batch_size=5))
    assert path == "training.packing_buffer"
    assert "use at least 5" in message
    assert "lower per_device_train_batch_size" in message
    load(apply_changes(tree, training__per_device_train_batch_size=4))
    load(apply_changes(tree, training__per_device_train_batch_size=5, training__packing=False))


def test_length_must_be_given_once():
    tree = stage2()
    del tree["global_max_length"]
    assert only_problem(tree)[0] == "global_max_length"
    settings = load(apply_changes(tree, template__max_length=8000)).settings
    assert (settings.global_max_length, settings.rollout_matching.vllm.max_model_len) == (8000, 8000)


@pytest.mark.scenario("R07.C21", on="pure")
@pytest.mark.parametrize("adapter", [None, {"rank": 8, "dora": True}])
def test_adapter_sync_needs_a_plain_adapter(adapter):
    tree = rollout(vllm={"enable_lora": True, "sync": {"mode": "adapter"}})
    path, message = only_problem(apply_changes(tree, model__adapter=adapter))
    assert path == "rollout_matching.vllm.sync.mode"
    assert "sync.mode: full" in message


@pytest.mark.scenario("R07.C7", on="pure")
@pytest.mark.parametrize(("learners", "resolved"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (8, 4), (256, 4)])
def test_tensor_parallel_size_follows_the_learner_world(learners, resolved):
    loaded = load(stage2(), learners=learners)
    assert loaded.settings.rollout_matching.vllm.tensor_parallel_size == resolved
    assert loaded.origins["rollout_matching.vllm.tensor_parallel_size"].startswith("derived")


def test_an_explicit_tensor_parallel_size_must_divide_the_learner_world():
    tree = rollout(vllm={"tensor_parallel_size": 4})
    path, message = only_problem(tree, learners=6)
    assert path == "rollout_matching.vllm.tensor_parallel_size"
    assert "1, 2, 3, 6" in message
    load(tree, learners=8)
    load(apply_changes(tree, rollout_matching__rollout_backend="hf"), learners=6)


def test_replicas_are_for_servers_only():
    replicas = {"rollout_matching__vllm__data_parallel_size": 2}
    path, message = only_problem(apply_changes(rollout(), **replicas))
    assert path == "rollout_matching.vllm.data_parallel_size"
    assert "2, but vllm.mode is colocate" in message
    assert "remove it, or set vllm.mode: server" in message
    load(apply_changes(rollout(), rollout_matching__vllm__data_parallel_size=1))
    vllm = load(server_mode(**replicas)).settings.rollout_matching.vllm
    assert (vllm.data_parallel_size, vllm.devices_per_server) == (2, 2)
    assert load(server_mode()).settings.rollout_matching.vllm.data_parallel_size == 1
    assert only_problem(server_mode(rollout_matching__vllm__data_parallel_size=0))[0] == path


@pytest.mark.parametrize(
    ("second", "path"),
    [
        ({"base_url": "http://127.0.0.1:8000", "group_port": 51217}, "base_url"),
        ({"base_url": "http://127.0.0.1:8001", "group_port": 51216}, "group_port"),
        ({"base_url": "http://127.0.0.1:8001", "group_port": 8001}, "group_port"),
        ({"base_url": "http://127.0.0.1:8001", "group_port": 8000}, "group_port"),
        ({"base_url": "http://127.0.0.1", "group_port": 80}, "group_port"),
        ({"base_url": "http://127.0.0.1:PORT", "group_port": 51217}, "base_url"),
        ({"base_url": "http://127.0.0.1:99999", "group_port": 51217}, "base_url"),
        ({"base_url": "http://a b:8000 ", "group_port": 51217}, "base_url"),
        ({"base_url": "127.0.0.1:8001", "group_port": 51217}, "base_url"),
        ({"base_url": "ftp://127.0.0.1:8001", "group_port": 51217}, "base_url"),
        ({"base_url": "http://127.0.0.1:8001", "group_port": 70000}, "group_port"),
    ],
)
def test_servers_do_not_share_addresses(second, path):
    tree = server_mode(rollout_matching__vllm__server={"servers": [SERVER, second]})
    assert only_problem(tree)[0] == f"rollout_matching.vllm.server.servers[1].{path}"


def test_servers_on_different_hosts_may_share_a_port():
    other = {"base_url": "http://10.0.0.2:8000", "group_port": 51216}
    load(server_mode(rollout_matching__vllm__server={"servers": [SERVER, other]}))


def test_a_module_is_declared_once_and_something_is_trained():
    twice = rollout(pipeline={"objective": [TOKEN_CE, TOKEN_CE], "diagnostics": []})
    assert only_problem(twice)[0] == "rollout_matching.pipeline.objective[1].name"
    silent = {"struct_ce_weight": 0.0, "desc_ce_weight": 0.0, "eos_ce_weight": 0.0}
    for off in ({"enabled": False}, {"weight": 0.0}, {"channels": ["A"]}, {"config": silent}):
        nothing = rollout(pipeline={"objective": [TOKEN_CE | off], "diagnostics": []})
        assert only_problem(nothing)[0] == "rollout_matching.pipeline.objective"


@pytest.mark.parametrize(("b_ratio", "channel"), [(1.0, "A"), (0.0, "B")])
def test_a_note_says_that_a_module_on_a_channel_without_steps_is_inactive(b_ratio, channel):
    modules = [TOKEN_CE, {**COORD_REG, "channels": [channel]}]
    tree = stage2(custom__trainer_variant="stage2_two_channel", stage2__b_ratio=b_ratio)
    (note,) = load(apply_changes(tree, rollout_matching__pipeline={"objective": modules, "diagnostics": []})).notes
    assert "coord_reg is inactive" in note.problem


def test_rules_on_world_sizes_are_skipped_while_the_sizes_are_unknown():
    settings = parse_settings(rollout(vllm={"tensor_parallel_size": 3})).settings
    assert settings.rollout_matching.vllm.tensor_parallel_size == 3
    assert parse_settings(stage2()).settings.rollout_matching.vllm.tensor_parallel_size is None


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        (rollout(vllm={"max_model_len": 1024}), "rollout_matching.vllm.max_model_len"),
        (
            rollout(decode_batch_size=8, vllm={"engine_args": {"max_num_batched_tokens": 7}}),
            "rollout_matching.vllm.engine_args.max_num_batched_tokens",
        ),
        (
            rollout(vllm={"engine_args": {"quantization": "fp8"}}),
            "rollout_matching.vllm.engine_args.quantization",
        ),
        (
            evaluating_with_vllm(decode_batch_size=8, vllm={"engine_args": {"max_num_batched_tokens": 7}}),
            "rollout_matching.vllm.engine_args.max_num_batched_tokens",
        ),
        (server_mode(rollout_matching__vllm__sleep=True), "rollout_matching.vllm.sleep"),
        (
            apply_changes(evaluating_with_vllm(vllm={"sleep": True}), training__use_cpu=True),
            "rollout_matching.vllm.sleep",
        ),
        (
            apply_changes(rollout(vllm={"sleep": True}), training__use_cpu=True),
            "rollout_matching.vllm.sleep",
        ),
        (stage2(stage2__max_staleness=3), "stage2.max_staleness"),
        (rollout(vllm={"max_model_len": 99999}), "rollout_matching.vllm.max_model_len"),
        (
            apply_changes(
                rollout(vllm={"enable_lora": True, "max_lora_rank": 8, "sync": {"mode": "adapter"}}),
                model__adapter={"rank": 64},
            ),
            "rollout_matching.vllm.max_lora_rank",
        ),
        (stage2(training__bf16=True, training__fp16=True), "training.fp16"),
        (stage2(training__gradient_accumulation_steps=0), "training.gradient_accumulation_steps"),
        (stage2(training__learning_rate=-1.0), "training.learning_rate"),
    ],
)
def test_numbers_that_cannot_work_are_refused(tree, path):
    assert only_problem(tree)[0] == path


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (stage2(), "a colocated engine shares its device with the learner, so one of them must wait"),
        (stage2(rollout_matching__rollout_backend="hf"), "the learner itself makes the rollouts, and then trains"),
        (stage1(), "this run trains on no rollouts"),
    ],
)
def test_rollouts_ahead_of_time_are_refused_where_nothing_can_make_them(tree, reason):
    path, message = only_problem(apply_changes(tree, stage2__max_staleness=1))
    assert path == "stage2.max_staleness" and reason in message
    assert "set stage2.max_staleness: 0" in message


def test_rollouts_ahead_of_time_are_accepted_with_servers():
    assert load(server_mode(stage2__max_staleness=2)).settings.stage2.max_staleness == 2


@pytest.mark.scenario("R17.C3", on="pure")
def test_a_setting_without_effect_is_a_note_and_not_an_error():
    only_a = {**COORD_REG, "channels": ["A"]}
    loaded = load(rollout(pipeline={"objective": [TOKEN_CE, only_a], "diagnostics": []}))
    (note,) = loaded.notes
    assert note.subject.endswith("objective[1]") and "coord_reg is inactive" in note.problem
    switched_back = apply_changes(
        server_mode(), rollout_matching__rollout_backend="hf", rollout_matching__offload__enabled=True
    )
    (note,) = load(switched_back).notes
    assert note.subject == "rollout_matching.offload"


def test_a_misspelt_section_does_not_hide_what_is_in_it():
    tree = stage2()
    tree["rollout_maching"] = tree.pop("rollout_matching")
    path, message = only_problem(tree)
    assert path == "rollout_maching"
    assert "did you mean rollout_matching?" in message


def test_the_message_on_a_key_in_the_wrong_section_names_the_right_path():
    path, message = only_problem(stage2(custom__decode_batch_size=4))
    assert path == "custom.decode_batch_size"
    assert "did you mean rollout_matching.decode_batch_size?" in message


NUMBER_CE = {"name": "number_ce", "enabled": True, "weight": 1.0, "channels": ["A"], "config": {"ce_weight": 1.0}}
ON_A = {"channels": ["A"]}
ADAPTER = {"rank": 4, "alpha": 8}


def native(*modules, diagnostics=(), **changes):
    """Return a Stage 1 config with native answers, and with these modules beside token_ce."""
    pipeline = {"objective": [TOKEN_CE | ON_A, *modules], "diagnostics": list(diagnostics)}
    return stage1(custom__answer_format="native", stage1__pipeline=pipeline, **changes)


def test_native_answers_are_accepted_in_stage_1():
    load(native(NUMBER_CE))
    load(native(NUMBER_CE, model__adapter=ADAPTER | {"train_coord_rows": False}))
    load(native(NUMBER_CE, COORD_REG | ON_A | {"enabled": False}))


@pytest.mark.parametrize(
    ("tree", "path", "expected"),
    [
        (stage2(custom__answer_format="native"), "custom.answer_format", "custom.trainer_variant: stage1_sft"),
        (native(NUMBER_CE, COORD_REG | ON_A), "stage1.pipeline", "configs/stage1-native.yaml"),
        (native(NUMBER_CE, BBOX_GEO | ON_A), "stage1.pipeline", "remove or disable bbox_geo"),
        (native(NUMBER_CE, diagnostics=[COORD_DIAG | ON_A]), "stage1.pipeline", "remove or disable coord_diag"),
        (
            native(COORD_REG | ON_A, diagnostics=[COORD_DIAG | ON_A]),
            "stage1.pipeline",
            "remove or disable coord_reg and coord_diag",
        ),
        (native(), "stage1.pipeline.objective", "declare number_ce"),
        (native(NUMBER_CE | {"weight": 0.0}), "stage1.pipeline.objective", "declare number_ce"),
        (
            stage1(stage1__pipeline={"objective": [TOKEN_CE | ON_A, NUMBER_CE], "diagnostics": []}),
            "stage1.pipeline.objective",
            "custom.answer_format: native",
        ),
        (native(NUMBER_CE, model__adapter=ADAPTER), "model.adapter.train_coord_rows", "set it to false"),
        (native(NUMBER_CE, custom__object_field_order="geometry_first"), "custom.object_field_order", "remove it"),
        (
            native(NUMBER_CE, rollout_matching__repeat_terminate={"enabled": True, "max_object_keys": 9}),
            "rollout_matching.repeat_terminate.max_object_keys",
            "set it to null",
        ),
    ],
)
def test_what_native_answers_cannot_do_is_refused_with_a_way_out(tree, path, expected):
    wrong_path, message = only_problem(tree)
    assert wrong_path == path
    assert expected in message


@pytest.mark.parametrize(
    ("module", "weight"),
    [
        (TOKEN_CE, "struct_ce_weight"),
        (TOKEN_CE, "desc_ce_weight"),
        (COORD_REG, "coord_ce_weight"),
        (COORD_REG, "soft_ce_weight"),
        (COORD_REG, "w1_weight"),
        (BBOX_GEO, "smoothl1_weight"),
        (BBOX_GEO, "ciou_weight"),
    ],
)
def test_each_weight_that_supervises_a_part_of_an_answer_is_an_objective_by_itself(module, weight):
    config = {name: 0.0 if name.endswith("_weight") else value for name, value in module["config"].items()}
    load(rollout(pipeline={"objective": [module | {"config": config | {weight: 0.5}}], "diagnostics": []}))


@pytest.mark.parametrize(
    ("module", "weight"),
    [(TOKEN_CE, "eos_ce_weight"), (COORD_REG, "coord_gate_weight"), (COORD_REG, "text_gate_weight")],
)
def test_an_objective_that_supervises_neither_structure_nor_names_nor_coordinates_is_refused(module, weight):
    config = {name: 0.0 if name.endswith("_weight") else value for name, value in module["config"].items()}
    tree = rollout(pipeline={"objective": [module | {"config": config | {weight: 0.5}}], "diagnostics": []})
    assert only_problem(tree)[0] == "rollout_matching.pipeline.objective"
    off = {"objective": [*tree["rollout_matching"]["pipeline"]["objective"], BBOX_GEO | {"enabled": False}]}
    assert only_problem(rollout(pipeline=off | {"diagnostics": []}))[0] == "rollout_matching.pipeline.objective"


@pytest.mark.parametrize("option", [False, True], ids=["a file", "an option"])
def test_a_list_of_modules_that_replaces_an_inherited_one_says_which_modules_are_gone(tmp_path, option):
    tree = stage2()
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(tree))
    own = {"extends": ["base.yaml"], "rollout_matching": {"pipeline": {"objective": [BBOX_GEO]}}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"extends": ["base.yaml"]} if option else own))
    override = [f"rollout_matching.pipeline.objective={json.dumps([BBOX_GEO])}"] if option else []
    (note,) = load_settings(tmp_path / "own.yaml", overrides=override).notes
    assert note.subject == "rollout_matching.pipeline.objective"
    assert f"{tmp_path}/base.yaml: token_ce, coord_reg are gone" in note.problem
    own["rollout_matching"]["pipeline"]["objective"] = [BBOX_GEO, COORD_REG, TOKEN_CE]
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    assert load_settings(tmp_path / "own.yaml").notes == ()


@pytest.mark.parametrize(
    "setting", ["model.path", "training.output_dir", "custom.train_jsonl", "custom.val_jsonl", "custom.eval_data"]
)
@pytest.mark.parametrize("scheme", ["s3://", "hf://", "https://", "file://"])
def test_an_address_is_no_path_and_what_may_be_secret_in_it_is_not_shown(setting, scheme):
    path = f"{scheme}user:secret@host/a.jsonl"
    value = (
        [{"path": ["b.jsonl", path], "name": "b", "max_new_tokens": 8}] if setting == "custom.eval_data" else path
    )
    subject, message = only_problem(stage2(**{setting.replace(".", "__"): value}))
    assert subject.startswith(setting) and scheme in message and "secret" not in message


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("steps", [0, -2])
def test_zero_steps_are_refused_because_transformers_would_train_for_three_epochs(steps, packing):
    training = {"output_dir": "runs/test", "max_steps": steps, "packing": packing}
    assert only_problem(stage2(training=training))[0] == "training.max_steps"
    load(stage2(training={"output_dir": "runs/test", "max_steps": -1}))


def test_epochs_that_train_nothing_are_refused_unless_the_steps_are_given():
    training = {"output_dir": "runs/test", "num_train_epochs": 0.0}
    assert only_problem(stage2(training=training))[0] == "training.num_train_epochs"
    load(stage2(training=training | {"max_steps": 3}))
