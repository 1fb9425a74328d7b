"""The shipped configs, and the documents that are generated from the schema."""

import json
import os
from pathlib import Path

import jsonschema
import pytest
import yaml

from coordexp.config import ConfigError, load_settings, schema
from coordexp.train.run import training_arguments
from tests.command import run

CONFIGS = sorted(Path("configs").rglob("*.yaml"))
PART, MIX_IN = Path("configs/base.yaml"), Path("configs/cpu.yaml")


def test_there_is_a_config_for_every_kind_of_run():
    names = {path.relative_to("configs").as_posix() for path in CONFIGS}
    assert names >= {
        "base.yaml",
        "stage1.yaml",
        "stage2-hf.yaml",
        "stage2-colocate.yaml",
        "stage2-server-3v1.yaml",
        "stage2-bbox-geo.yaml",
        "demo/stage1-cpu.yaml",
    }


@pytest.mark.parametrize("path", [path for path in CONFIGS if path not in (PART, MIX_IN)], ids=str)
def test_a_shipped_config_loads_and_nothing_in_it_is_without_effect(path):
    assert load_settings(path).notes == ()


@pytest.mark.parametrize("name", ["stage1.yaml", "stage1-lora-24gb.yaml", "stage2.yaml", "stage2-hf.yaml"])
def test_the_mix_in_turns_a_config_for_gpus_into_one_for_cpus(tmp_path, name):
    folder = os.path.relpath(Path("configs").resolve(), tmp_path)
    (tmp_path / "mine.yaml").write_text(f"extends: [{folder}/{name}, {folder}/cpu.yaml]\n")
    loaded = load_settings(tmp_path / "mine.yaml")
    training_arguments(loaded.settings, samples=10)  # raises where torch sees no GPU that the settings need
    assert loaded.settings.training.use_cpu and loaded.settings.backend == "hf"
    assert loaded.notes == ()


@pytest.mark.parametrize(("pixels", "answer"), [(786_432, 350), (1_048_576, 1024)])
def test_the_config_for_24_gb_fits_on_such_a_gpu(pixels, answer):
    words = ["--size", "4b", "--memory", "24", "--pixels", pixels, "--answer-tokens", answer, "--json"]
    result = run("plan", "--config", "configs/stage1-lora-24gb.yaml", *words)
    assert json.loads(result.stdout)["findings"] == []


def test_the_configs_of_stage_2_follow_the_recommendations_of_the_results():
    """docs/results.md and docs/correction.md: which policy, how many rollout steps, and that names are trained."""
    for path in CONFIGS:
        if (
            path.parent != Path("configs")
            or not path.name.startswith("stage2")
            or path.name.endswith("specified.yaml")
        ):
            continue
        settings = load_settings(path).settings
        policy = settings.rollout_matching.correction
        assert (policy.duplicates, policy.extras, policy.insertion) == ("remove", "keep", "reading_order"), path
        assert settings.custom.object_order == "reading", path
        assert policy.supervise == "matched_with_desc" and policy.closing_weight < 1, path
        assert settings.stage2.b_ratio in (None, 0.25), path
        (text,) = [module for module in settings.pipeline.objective if module.name == "token_ce"]
        assert text.config.desc_ce_weight > 0, path


def test_the_shared_part_lacks_only_what_each_run_must_set():
    with pytest.raises(ConfigError) as caught:
        load_settings(PART)
    assert all("missing" in finding.problem for finding in caught.value.findings)


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_the_editor_schema_accepts_a_shipped_config_as_it_is_written(path):
    jsonschema.Draft202012Validator(schema.editor_schema()).validate(yaml.safe_load(path.read_text()))


@pytest.mark.scenario("R12.C1", on="pure")
@pytest.mark.parametrize(
    "invalid",
    [
        {"rollout_matching": {"unknown": 1}},
        {"rollout_matching": {"decode_batch_size": "four"}},
        {"rollout_matching": {"vllm": {"server": {"servers": [{"base_url": "http://a"}]}}}},
        {"rollout_matching": {"pipeline": {"objective": [{"name": "token_ce"}]}}},
        {"rollout_matching": {"pipeline": {"objective": []}}},
        {"rollout_matching": {"vllm": {"server": {"servers": [{"base_url": "nonsense", "group_port": 1}]}}}},
    ],
)
def test_the_editor_schema_refuses_what_the_loader_refuses(invalid):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema.editor_schema()).validate(invalid)


def test_the_editor_schema_accepts_empty_sections():
    jsonschema.Draft202012Validator(schema.editor_schema()).validate({"rollout_matching": None, "stage1": None})


def test_every_setting_has_a_description():
    definitions = [schema.root(), *schema.root()["$defs"].values()]
    nodes = [(key, node) for part in definitions for key, node in part.get("properties", {}).items()]
    assert len(nodes) > 150
    assert [key for key, node in nodes if not node.get("description")] == []


def test_settings_survive_a_round_trip_through_json():
    settings = load_settings("configs/stage2-server-3v1.yaml").settings
    again = type(settings).model_validate(json.loads(settings.model_dump_json()))
    assert again == settings


def test_examples_and_defaults_fit_their_own_schema():
    for path, node in schema.leaves():
        for value in [*node.get("examples", []), *([node["default"]] if "default" in node else [])]:
            validator = jsonschema.Draft202012Validator({**node, "$defs": schema.root()["$defs"]})
            assert validator.is_valid(value), (path, value)
