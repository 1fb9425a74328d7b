"""Values of `--set`: how they are read, what they replace, and how mistakes in them are reported."""

import json
import sys

import pytest
import yaml

from coordexp.config import ConfigError, World, load_settings
from coordexp.config.yaml_tree import read_document
from coordexp.launch.plan import LaunchOptions, make_plan
from coordexp.train.folder import write_run_folder
from tests.command import run

CONFIG = "configs/stage1.yaml"
SERVERS = "configs/stage2-server-3v1.yaml"


def load(*overrides, config=CONFIG):
    return load_settings(config, World(1), overrides)


def messages_of(*overrides, config=CONFIG):
    with pytest.raises(ConfigError) as caught:
        load(*overrides, config=config)
    return [str(finding) for finding in caught.value.findings]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6", 6),
        ("1e-5", 1e-5),
        ("no", "no"),
        ("null", None),
        ("true", True),
        ("[tensorboard, wandb]", ["tensorboard", "wandb"]),
        ("{a: 1, b: [x]}", {"a": 1, "b": ["x"]}),
        ("a=b", "a=b"),
        ('"7"', "7"),
    ],
)
def test_a_value_is_read_as_in_a_yaml_file(tmp_path, text, expected):
    (tmp_path / "a.yaml").write_text("m: {x: 1, y: 2}\n")
    document = read_document(tmp_path / "a.yaml", [f"m.x={text}"])
    assert document.tree == {"m": {"x": expected, "y": 2}}
    assert not document.findings


def test_a_later_override_wins_and_a_section_that_is_missing_is_made(tmp_path):
    (tmp_path / "a.yaml").write_text("m: null\n")
    document = read_document(tmp_path / "a.yaml", ["m.deep.x=1", "m.deep.x=2"])
    assert document.tree == {"m": {"deep": {"x": 2}}}


def test_a_section_is_replaced_with_its_origins(tmp_path):
    (tmp_path / "a.yaml").write_text("m: {x: 1, y: 2}\n")
    document = read_document(tmp_path / "a.yaml", ["m={z: 3}"])
    assert document.tree == {"m": {"z": 3}}
    assert {path: str(origin) for path, origin in document.places.items()} == {
        ("m",): "command line (--set m)",
        ("m", "z"): "command line (--set m)",
    }


def test_settings_have_the_value_and_its_origin():
    loaded = load("training.max_steps=6", "stage1.pipeline.objective[0].config.desc_ce_weight=0.5")
    assert loaded.settings.training.max_steps == 6
    assert loaded.settings.stage1.pipeline.objective[0].config.desc_ce_weight == 0.5
    assert loaded.origins["training.max_steps"] == "command line (--set training.max_steps)"
    assert set(loaded.overrides) == {"training.max_steps", "stage1.pipeline.objective[0].config.desc_ce_weight"}
    assert load().overrides == {}


def test_an_item_of_a_list_is_replaced_alone():
    loaded = load("rollout_matching.vllm.server.servers[1].base_url=http://127.0.0.1:9000", config=SERVERS)
    ports = [server.base_url[-4:] for server in loaded.settings.rollout_matching.vllm.server.servers]
    assert ports == ["8000", "9000", "8002"]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("training.max_steps=six", 'training.max_steps: "six" is not'),
        ("training.max_step=6", "training.max_step: unknown key"),
        ("training.max_steps", "training.max_steps: not a setting with a value"),
        ("training.max_steps=", "training.max_steps: not a setting with a value"),
        ("=6", "not a setting with a value"),
        ("a b=6", "not a setting with a value"),
        ("custom.prompt=[", "custom.prompt: the value is not YAML"),
        ("custom.prompt=!!python/name:os.system x", "custom.prompt: "),
        ("training.max_steps.x=6", "training.max_steps.x: training.max_steps is not a section"),
        ("stage1.pipeline.objective[7].weight=1", "stage1.pipeline.objective has 2 items, so there is no [7]"),
        ("training[0]=1", "training has 0 items, so there is no [0]"),
        ("extends=other.yaml", "extends: unknown key"),
    ],
)
def test_a_mistake_names_the_option(override, problem):
    (message,) = messages_of(override)
    assert problem in message
    assert f"command line (--set {override.partition('=')[0]})" in message


def test_mistakes_of_files_and_of_options_are_reported_together(tmp_path):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"global_max_length": "long"}))
    messages = messages_of("training.max_steps=six", config=tmp_path / "a.yaml")
    assert any("global_max_length" in message for message in messages)
    assert any("--set training.max_steps" in message for message in messages)


def test_check_shows_the_origin_and_refuses_a_wrong_option():
    result = run("check", "--config", CONFIG, "--set", "training.max_steps=6", "--json")
    details = json.loads(result.stdout)["details"]
    assert details["settings"]["training"]["max_steps"] == 6
    assert details["origins"]["training.max_steps"] == "command line (--set training.max_steps)"
    result = run("check", "--config", CONFIG, "--set", "training.max_steps=six", code=2)
    assert "command line (--set training.max_steps)" in result.stdout


@pytest.mark.parametrize("command", ["train", "serve", "launch", "plan"])
def test_every_command_with_a_config_takes_the_option(command):
    result = run(command, "--config", CONFIG, "--set", "training.max_steps=six", code=2)
    assert "command line (--set training.max_steps)" in result.output


def test_launch_passes_the_options_to_servers_and_learners():
    override = "training.max_steps=6"
    options = LaunchOptions(SERVERS, "0,1,2", "3", overrides=(override,))
    plan = make_plan(load(override, config=SERVERS).settings, options)
    serve = ("serve", "--config", SERVERS, f"--set={override}", "--index", "0")
    assert plan.servers[0].part.command == (sys.executable, "-m", "coordexp", *serve)
    train = ("train", "--config", SERVERS, f"--set={override}")
    assert plan.learner.command == (sys.executable, "-m", "coordexp", *train)


def test_the_run_folder_says_which_values_came_from_the_command_line(tmp_path):
    write_run_folder(tmp_path, load("training.max_steps=6"), {}, {}, None)
    text = (tmp_path / "resolved.yaml").read_text()
    assert text.startswith("# training.max_steps: command line (--set training.max_steps)\n")
    assert yaml.safe_load(text)["training"]["max_steps"] == 6
    assert load_settings(tmp_path / "resolved.yaml", World(1)).settings.training.max_steps == 6
