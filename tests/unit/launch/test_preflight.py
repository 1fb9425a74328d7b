"""The checks before anything is started, on a machine that each test sets up."""

import json
import os
import socket
from pathlib import Path

import pytest
import yaml

from coordexp.cli import launch
from coordexp.cli.check import data_problems, missing_files
from coordexp.config import World, load_settings
from coordexp.demo.model import make_tokenizer
from coordexp.errors import UserError
from coordexp.launch import preflight, processes
from coordexp.launch.memory import total_bytes
from coordexp.launch.plan import LaunchOptions, make_plan
from coordexp.launch.preflight import DeviceMemory
from tests.command import run
from tests.vocabularies import table

CONFIG = Path("configs/stage2-server-3v1.yaml").resolve()
RECORD = {"image": "1.png", "width": 8, "height": 8, "space": "pixel", "objects": []}
SHAPES = {"model.embed_tokens.weight": (1000, 1000), "model.layers.0.q_proj.weight": (3000, 1000)}
MODEL = {
    "model_type": "qwen3_vl",
    "text_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 1000,
    },
    "vision_config": {
        "hidden_size": 16,
        "depth": 2,
        "num_heads": 2,
        "intermediate_size": 32,
        "deepstack_visual_indexes": [1],
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
    },
}
GB = 10**9


def free_ports(count):
    probes = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def write_config(tmp_path):
    """Write a config with three servers, a model and data that fit together."""
    folder = tmp_path / "model"
    folder.mkdir()
    table("random-1").tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(MODEL))
    header = json.dumps(
        {"__metadata__": {}} | {name: {"dtype": "BF16", "shape": shape} for name, shape in SHAPES.items()}
    ).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "train.jsonl").write_text(json.dumps(RECORD))
    (tmp_path / "1.png").touch()
    ports = free_ports(6)
    tree = {
        "extends": [os.path.relpath(CONFIG, tmp_path)],
        "model": {"path": str(folder)},
        "custom": {"train_jsonl": str(tmp_path / "train.jsonl"), "val_jsonl": str(tmp_path / "train.jsonl")},
        "rollout_matching": {"vllm": {"gpu_memory_utilization": 0.1, "server": {"servers": [
            {"base_url": f"http://127.0.0.1:{ports[2 * k]}", "group_port": ports[2 * k + 1]} for k in range(3)
        ]}}},
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def config(tmp_path):
    return write_config(tmp_path)


def load(config):
    return load_settings(config, World(1)).settings


def subjects(problems):
    return [problem.subject for problem in problems]


def check_files(config, *images):
    """Return the subjects of the problems of the files of a config."""
    settings = load(config)
    return subjects(
        [*missing_files(settings), *data_problems(settings, images), *preflight.model_problems(settings)]
    )


def test_a_config_that_fits_has_no_problems(config):
    assert check_files(config) == []
    assert subjects(preflight.port_problems(load(config), LaunchOptions(str(config), cpu=True))) == []


def test_a_port_in_use_is_reported_with_its_setting(config):
    servers = load(config).rollout_matching.vllm.server.servers
    http = int(servers[1].base_url.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", http)), socket.create_server(("", servers[2].group_port)):
        reported = list(preflight.port_problems(load(config), LaunchOptions(str(config), cpu=True)))
        places = [".".join(subject.split(".")[-2:]) for subject in subjects(reported)]
        assert places == ["servers[1].base_url", "servers[2].group_port"]
        assert str(http) in reported[0].problem and str(servers[2].group_port) in reported[1].problem
        elsewhere = LaunchOptions(str(config), cpu=True, start_servers=False)
        assert subjects(preflight.port_problems(load(config), elsewhere)) == []


SPOILT = {
    "no tokenizer": lambda folder: (folder / "model/tokenizer.json").unlink(),
    "a broken record": lambda folder: (folder / "train.jsonl").write_text('{"image": 5}'),
    "no file": lambda folder: (folder / "train.jsonl").unlink(),
    "no record": lambda folder: (folder / "train.jsonl").write_text(""),
    "no image": lambda folder: (folder / "1.png").unlink(),
    "a linked image": lambda folder: link_elsewhere(folder / "1.png"),
}


def link_elsewhere(file):
    elsewhere = file.parents[1] / f"{file.parent.name}-elsewhere"
    elsewhere.mkdir()
    file.rename(elsewhere / file.name)
    file.symlink_to(elsewhere / file.name)


@pytest.mark.parametrize("spoil", SPOILT)
def test_files_that_parts_cannot_use_are_reported(config, spoil):
    SPOILT[spoil](config.parent)
    assert ("model.path" if "tokenizer" in spoil else "custom.train_jsonl") in check_files(config)
    if "linked" in spoil:
        assert check_files(config, (config.parent / "1.png").resolve().parent) == []


def test_native_answers_need_no_coordinate_tokens_a_family_that_has_them_and_boxes(config, tmp_path):
    tree = yaml.safe_load(config.read_text()) | {
        "extends": [os.path.relpath(Path("configs/stage1-native.yaml"), tmp_path)],
        "rollout_matching": {},
    }
    config.write_text(yaml.safe_dump(tree))
    tokenizer = make_tokenizer("small", coords=False).backend_tokenizer
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    assert check_files(config) == []
    (tmp_path / "model/config.json").write_text(json.dumps(MODEL | {"model_type": "qwen2_5_vl"}))
    leaf = {"desc": "leaf", "poly": [1, 1, 5, 1, 3, 5]}
    (tmp_path / "train.jsonl").write_text(json.dumps(RECORD) + "\n" + json.dumps(RECORD | {"objects": [leaf]}))
    reported = check_files(config)
    assert len(reported) == 2 and "custom.train_jsonl" in reported  # not of val_jsonl


def test_gpus_must_exist_and_be_allowed(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    four = {gpu: DeviceMemory(80 * GB, 80 * GB) for gpu in range(4)}
    options = LaunchOptions("x.yaml", "0,1,2", "3")
    assert subjects(preflight.gpu_problems(options, four)) == []
    assert subjects(preflight.gpu_problems(options, {k: four[k] for k in range(3)})) == ["--train-gpus"]
    assert subjects(preflight.gpu_problems(options, {})) != []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    assert subjects(preflight.gpu_problems(options, four)) == ["--server-gpus"]


def test_memory_is_counted_from_headers(config):
    settings = load(config)
    plan = make_plan(settings, LaunchOptions(str(config), cpu=True))
    needs = preflight.estimate_needs(plan, settings, config.parent / "model")
    needed = {part: total_bytes(need) for part, need in needs.items()}
    cache = 2 * 2 * 2 * 8 * settings.rollout_matching.vllm.max_model_len * 2
    assert needed["server 0"] == 4_000_000 * 2 + cache
    assert needed["learner"] == 4_000_000 * 4 * 4  # weights, gradients, two states of Adam, all in float32


def gpu_memory_problems(config, total, free):
    """Return what is reported if all GPUs have this memory."""
    settings = load(config)
    plan = make_plan(settings, LaunchOptions(str(config), "0,1,2", "3"))
    memory = dict.fromkeys(range(4), DeviceMemory(int(total * GB), int(free * GB)))
    return list(preflight.memory_problems(plan, settings, memory)[1])


SMALL_GPUS = [(1, 0.05), (0.05, 0.05), (0.02, 0.02)]


def test_missing_memory_is_reported(config):
    """Its amounts are in tests/messages.txt."""
    assert gpu_memory_problems(config, 40, 40) == []
    severities = [{problem.severity for problem in gpu_memory_problems(config, *gpu)} for gpu in SMALL_GPUS]
    assert all(found == {"error"} for found in severities)


def test_a_model_that_the_formulas_are_not_for_is_not_estimated(config):
    plan = make_plan(load(config), LaunchOptions(str(config), cpu=True))
    file = config.parent / "model/config.json"
    file.write_text(json.dumps({"model_type": "other"}))
    assert preflight.estimate_needs(plan, load(config), file.parent) == {}
    file.write_text(json.dumps({"model_type": "qwen3_vl"}))
    _, (problem,) = preflight.memory_problems(plan, load(config), None)
    assert "config.json cannot be read: KeyError('text_config')" in str(problem)


def test_gpus_are_found_by_nvidia_smi(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '0, 81920, 81000\\n1, 81920, 5\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert preflight.find_gpus() == {
        0: DeviceMemory(81920 * 2**20, 81000 * 2**20),
        1: DeviceMemory(81920 * 2**20, 5 * 2**20),
    }


def test_a_run_without_servers_is_refused_for_that_alone_wherever_vllm_is_installed(monkeypatch):
    def miss(_):
        raise UserError("vLLM is not installed")

    monkeypatch.setattr(launch, "check_vllm", miss)
    config = "configs/demo/coco-cpu.yaml"
    result = run("launch", "--config", config, "--cpu", "--check-only", "--json", code=2)
    subjects = {finding["subject"] for finding in json.loads(result.stdout)["findings"]}
    assert "custom.trainer_variant" in subjects or "rollout_matching.vllm.mode" in subjects
    assert "vllm" not in subjects


def test_the_plan_as_json_has_every_part_with_its_command_and_memory(config):
    result = run("launch", "--config", config, "--cpu", "--learners", 2, "--check-only", "--json")
    report = json.loads(result.stdout)
    assert report["ok"] is True and report["checked"] == str(config)
    plan, memory = report["details"]["plan"], report["details"]["memory"]
    assert [server["part"]["command"][-1] for server in plan["servers"]] == ["0", "1", "2"]
    assert plan["servers"][0]["world_size"] == 1 and plan["learners"] == 2
    assert memory["server 2"] > 8_000_000 and memory["learner"] == 80_000_000  # with the gradient buckets of DDP


def test_a_launch_that_is_impossible_reports_all_problems_and_starts_nothing(config):
    (config.parent / "train.jsonl").unlink()
    options = ["--server-gpus", "x", "--train-gpus", "1"]
    subjects = {
        str(config): {"--server-gpus", "custom.train_jsonl"},
        "examples/check/ten-mistakes.yaml": {"--server-gpus", "rollout_matching.decode_batch_size"},
    }
    for file, expected in subjects.items():
        result = run("launch", "--config", file, *options, "--check-only", "--json", code=2)
        assert expected <= {finding["subject"] for finding in json.loads(result.stdout)["findings"]}


def test_a_launch_makes_a_token_that_it_does_not_show_and_returns_the_learners_code(config, monkeypatch):
    monkeypatch.delenv("COORDEXP_SERVER_TOKEN", raising=False)
    tokens = []

    class FakeLaunch:
        def __init__(self, plan, log, token, patience):
            tokens.append(token)

        def run(self):
            return 5

    monkeypatch.setattr(processes, "Launch", FakeLaunch)
    result = run("launch", "--config", config, "--cpu", code=5)
    (token,) = tokens
    assert len(token) == 43 and token not in result.output


def test_every_file_of_every_data_set_is_checked_and_named(config, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").touch()
        (tmp_path / name / "part-0.jsonl").write_text(json.dumps(RECORD))
    (tmp_path / "a/part-1.jsonl").write_text(json.dumps(RECORD | {"image": "../b/1.png"}))
    sets = [{"path": str(tmp_path / "a/part-*.jsonl")}, {"path": [str(tmp_path / "b/part-0.jsonl")]}]
    tree = yaml.safe_load(config.read_text())
    tree["custom"] = {"train_jsonl": None, "train_data": sets, "val_jsonl": str(tmp_path / "b/*.jsonl")}
    config.write_text(yaml.safe_dump(tree))
    assert check_files(config) == [], "servers read a and b"
    (tmp_path / "a/part-1.jsonl").write_text(json.dumps(RECORD | {"image": "2.png"}))
    (tmp_path / "b/part-0.jsonl").write_text("{}")
    reported = list(data_problems(load(config), []))
    places = ["custom.train_data[0].path", "custom.train_data[1].path", "custom.val_jsonl"]
    assert sorted(subjects(reported)) == places
    assert "a/part-1.jsonl" in str(reported[0]) and "b/part-0.jsonl:1" in str(reported[1])
