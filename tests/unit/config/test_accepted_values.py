"""The values and keys that a rollout config accepts, listed as in the specification."""

from typing import Any

import pytest

from coordexp.config.rollout import RolloutMatching
from coordexp.config.schema import names_at, root
from tests.unit.config.trees import (
    BBOX_GEO,
    COORD_DIAG,
    COORD_REG,
    SERVER,
    TOKEN_CE,
    apply_changes,
    load,
    only_problem,
    problems,
    server_mode,
    stage1,
    stage2,
)


def rollout(tree: dict[str, Any], **changes: Any) -> RolloutMatching:
    return load(apply_changes(tree, **changes)).settings.rollout_matching


@pytest.mark.scenario("R02.C1", on="pure")
@pytest.mark.parametrize("field", ["name", "enabled", "weight", "channels", "config"])
@pytest.mark.parametrize("part", ["objective", "diagnostics"])
def test_an_entry_of_either_list_states_every_field(part: str, field: str) -> None:
    module = TOKEN_CE if part == "objective" else COORD_DIAG
    entry = {key: value for key, value in module.items() if key != field}
    pipeline = {"objective": [COORD_REG], "diagnostics": []}
    pipeline[part] = [*pipeline[part], entry]
    path, message = only_problem(stage2(rollout_matching__pipeline=pipeline))
    assert path == f"rollout_matching.pipeline.{part}[{len(pipeline[part]) - 1}].{field}"
    assert "missing" in message


@pytest.mark.scenario("R03.C1", "R03.C2", on="pure")
@pytest.mark.parametrize(
    ("module", "keys"),
    [
        (BBOX_GEO, {"smoothl1_weight", "ciou_weight"}),
        (
            COORD_REG,
            {
                "coord_ce_weight",
                "soft_ce_weight",
                "w1_weight",
                "coord_gate_weight",
                "text_gate_weight",
                "temperature",
                "target_sigma",
                "target_truncate",
            },
        ),
    ],
)
def test_a_module_accepts_exactly_the_keys_of_the_specification(module: dict[str, Any], keys: set[str]) -> None:
    tree = stage2(rollout_matching__pipeline={"objective": [module, TOKEN_CE], "diagnostics": []})
    load(tree)
    assert set(module["config"]) == keys
    assert set(names_at(("rollout_matching", "pipeline", "objective", 0, "config"), tree)) == keys


@pytest.mark.scenario("R04.C1", on="pure")
@pytest.mark.parametrize(("value", "is_accepted"), [(0.0, True), (0.5, True), (-0.1, False), ("0.5", False)])
def test_text_gate_weight_is_a_number_of_at_least_0(value: Any, is_accepted: bool) -> None:
    module = {**COORD_REG, "config": {**COORD_REG["config"], "text_gate_weight": value}}
    tree = stage2(rollout_matching__pipeline={"objective": [TOKEN_CE, module], "diagnostics": []})
    if is_accepted:
        load(tree)
    else:
        assert only_problem(tree)[0] == "rollout_matching.pipeline.objective[1].config.text_gate_weight"


@pytest.mark.scenario("R07.C2", "R07.C4", "R07.C18", "R07.C19", "R17.C1", on="pure")
@pytest.mark.parametrize(
    ("setting", "default", "accepted", "refused"),
    [
        ("rollout_backend", "vllm", ["vllm", "hf"], ["sglang", True]),
        ("vllm__mode", "colocate", ["colocate", "server"], ["remote", 1]),
        ("vllm__sync__mode", "full", ["full", "adapter", "auto"], ["delta", False]),
        ("vllm__sync__fallback_to_full", True, [True, False], ["yes", 1]),
        ("offload__enabled", False, [True, False], ["no", 0]),
        ("offload__offload_model", False, [True, False], [1]),
        ("offload__offload_optimizer", False, [True, False], [1]),
    ],
)
def test_a_choice_has_its_default_and_its_values_and_no_others(
    setting: str, default: Any, accepted: list[Any], refused: list[Any]
) -> None:
    path = f"rollout_matching__{setting}"
    valid = server_mode(model__adapter={"rank": 8}, rollout_matching__vllm__enable_lora=True)
    unset = stage2()
    unset["rollout_matching"] = {"pipeline": unset["rollout_matching"]["pipeline"]}
    assert _setting_at(load(unset).settings.rollout_matching, setting) == default
    for value in accepted:
        resolved = _setting_at(rollout(valid, **{path: value}), setting)
        assert resolved == ("adapter" if value == "auto" else value)
    for value in refused:
        assert path.replace("__", ".") in problems(apply_changes(valid, **{path: value}))


@pytest.mark.scenario("R07.C12", on="pure")
@pytest.mark.parametrize("servers", [[], None, {}, "http://127.0.0.1:8000"])
def test_server_mode_needs_a_list_of_servers(servers: Any) -> None:
    path, _ = only_problem(server_mode(rollout_matching__vllm__server={"servers": servers}))
    assert path == "rollout_matching.vllm.server.servers"


@pytest.mark.scenario("R07.C12", on="pure")
@pytest.mark.parametrize(
    ("entry", "place"),
    [
        ({"base_url": SERVER["base_url"]}, "group_port"),
        ({"group_port": SERVER["group_port"]}, "base_url"),
        ({**SERVER, "group_port": "51216"}, "group_port"),
        ({**SERVER, "base_url": 8000}, "base_url"),
    ],
)
def test_a_server_has_an_address_that_is_text_and_a_port_that_is_a_number(entry: Any, place: str) -> None:
    path, _ = only_problem(server_mode(rollout_matching__vllm__server={"servers": [entry]}))
    assert path == f"rollout_matching.vllm.server.servers[0].{place}"


@pytest.mark.scenario("R07.C13", "R07.C14", on="pure")
def test_timeouts_are_numbers_and_the_one_of_answers_may_be_null_0_or_less() -> None:
    server = rollout(server_mode()).vllm.server
    assert (server.timeout_s, server.infer_timeout_s, server.hung_after_s) == (240.0, None, 60.0)
    for seconds in (1, 2.5):
        timeouts = {"timeout_s": seconds, "infer_timeout_s": seconds}
        given = rollout(
            server_mode(), rollout_matching__vllm__server={"servers": [SERVER], **timeouts}
        ).vllm.server
        assert (given.timeout_s, given.infer_timeout_s) == (seconds, seconds)
    for seconds in (None, 0, -1, -2.5):
        tree = server_mode(rollout_matching__vllm__server={"servers": [SERVER], "infer_timeout_s": seconds})
        assert rollout(tree).vllm.server.infer_timeout_s == seconds
    for name, value in (("timeout_s", None), ("timeout_s", "4"), ("infer_timeout_s", "4")):
        tree = server_mode(rollout_matching__vllm__server={"servers": [SERVER], name: value})
        assert only_problem(tree)[0] == f"rollout_matching.vllm.server.{name}"


@pytest.mark.scenario("R07.C22", on="pure")
@pytest.mark.parametrize(("enable_lora", "resolved"), [(True, "adapter"), (False, "full")])
def test_auto_is_adapter_with_lora_and_full_without(enable_lora: bool, resolved: str) -> None:
    tree = server_mode(
        model__adapter={"rank": 8},
        rollout_matching__vllm__enable_lora=enable_lora,
        rollout_matching__vllm__sync__mode="auto",
    )
    assert rollout(tree).vllm.sync.mode == resolved


@pytest.mark.scenario("R07.C1", "R10.C3", "R10.S4", "R10.S5", on="pure")
@pytest.mark.parametrize("name", sorted(RolloutMatching.model_fields))
def test_every_rollout_setting_under_custom_extra_is_refused_with_its_own_name_at_the_new_place(name: str) -> None:
    value = RolloutMatching().model_dump(mode="json")[name]
    path, message = only_problem(stage2(custom__extra={"rollout_matching": {name: value}}))
    assert path == f"custom.extra.rollout_matching.{name}"
    assert f"use rollout_matching.{name}" in message


@pytest.mark.scenario("R12.C1", on="pure")
@pytest.mark.parametrize(
    "section",
    ["", "decoding", "repeat_terminate", "offload", "optimal_transport", "vllm", "vllm.sync", "vllm.server"],
)
def test_the_settings_classes_alone_say_which_keys_a_section_has(section: str) -> None:
    place = ("rollout_matching", *(section.split(".") if section else ()))
    known = names_at(place, {})
    assert known
    tree = apply_changes(server_mode(), **{"__".join((*place, "zzz")): 1})
    path, message = only_problem(tree)
    assert path == ".".join((*place, "zzz"))
    assert "unknown key" in message
    assert root()["additionalProperties"] is False


@pytest.mark.scenario("R18.C2", on="pure")
def test_rollouts_are_opt_in() -> None:
    """A config that names no variant trains on ground truth and needs no rollout settings."""
    tree = stage1()
    del tree["custom"]["trainer_variant"]
    settings = load(tree).settings
    assert (settings.custom.trainer_variant, settings.uses_rollouts) == ("stage1_sft", False)
    assert settings.channels == {"A"}


@pytest.mark.scenario("R17.C3", on="pure")
@pytest.mark.parametrize("backend", ["server", "hf"])
def test_without_a_colocated_engine_offload_is_accepted_with_a_note(backend: str) -> None:
    tree = server_mode(rollout_matching__offload={"enabled": True, "offload_model": True})
    if backend == "hf":
        tree = apply_changes(tree, rollout_matching__rollout_backend="hf")
    assert any(str(note).startswith("rollout_matching.offload: not used") for note in load(tree).notes)


@pytest.mark.scenario("R32.C1", on="pure")
@pytest.mark.parametrize(
    ("key", "default", "accepted", "refused"),
    [
        ("temperature", 0.0, [0, 0.5, 2.0], [-0.1, "1"]),
        ("top_p", 1.0, [0.1, 1.0], [0.0, 1.1, -1]),
        ("top_k", -1, [-1, 1, 50], [0, -2, 1.5]),
    ],
)
def test_sampling_has_the_bounds_and_defaults_of_the_specification(
    key: str, default: Any, accepted: list[Any], refused: list[Any]
) -> None:
    assert getattr(load(stage2()).settings.rollout_matching.decoding, key) == default
    for value in accepted:
        assert getattr(rollout(stage2(), **{f"rollout_matching__decoding__{key}": value}).decoding, key) == value
    for value in refused:
        assert only_problem(stage2(**{f"rollout_matching__decoding__{key}": value}))[0].endswith(key)


def _setting_at(settings: Any, path: str) -> Any:
    for name in path.split("__"):
        settings = getattr(settings, name)
    return settings
