"""The launcher and what it starts read one contract: settings that the loader has validated and completed."""

import ast
import re

import pytest
import yaml

import coordexp.train.run
from coordexp.cli import launch as launcher
from coordexp.config import RolloutContract
from coordexp.data import TrueObject
from coordexp.demo.model import Size, make_model
from coordexp.launch import preflight
from tests import source
from tests.command import run
from tests.scripted import write_training_set
from tests.unit.answers.conftest import box
from tests.unit.config.trees import stage2
from tests.unit.launch.test_preflight import free_ports
from tests.vocabularies import table

LENGTH = 4096
SOURCE = source.SOURCE / "coordexp"


@pytest.fixture
def config(tmp_path):
    """Return a config with two servers that leaves out the settings which the loader derives."""
    make_model(tmp_path / "model", "small", size=Size(hidden=64, layers=1, vision_hidden=32, vision_depth=1))
    write_training_set(tmp_path, {"1.png": (TrueObject("cup", box(10, 10, 110, 110)),)}, table("qwen"))
    (tmp_path / "1.png").touch()
    ports = free_ports(4)
    servers = [{"base_url": f"http://127.0.0.1:{ports[k]}/", "group_port": ports[k + 1]} for k in (0, 2)]
    tree = stage2(
        model={"path": str(tmp_path / "model"), "dtype": "float32"},
        custom__train_jsonl=str(tmp_path / "train.jsonl"),
        global_max_length=LENGTH,
        training={"output_dir": str(tmp_path / "run"), "use_cpu": True, "max_steps": 1, "report_to": "none"},
        rollout_matching__decode_batch_size=3,
        rollout_matching__decoding={"temperature": 0.7},
        rollout_matching__vllm={
            "mode": "server",
            "gpu_memory_utilization": 0.1,
            "sync": {"mode": "auto"},
            "server": {"servers": servers},
        },
    )
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def preflight_sees(monkeypatch):
    """Record the rollout settings that each part of the preflight gets, and what it returns."""
    seen = {}

    def record(module, name, position):
        original = getattr(module, name)

        def call(*arguments):
            result = original(*arguments)
            seen[name] = arguments[position].rollout_matching_cfg, result
            return result

        monkeypatch.setattr(module, name, call)

    record(launcher, "make_plan", 0)
    record(preflight, "model_problems", 0)
    record(preflight, "port_problems", 0)
    record(preflight, "memory_problems", 1)
    return seen


@pytest.fixture
def trainer_gets(monkeypatch):
    """Record the arguments that `coordexp train` gives to the trainer, which then does not run."""
    arguments = {}

    def trainer(**options):
        arguments.update(options)
        raise InterruptedError

    monkeypatch.setattr(coordexp.train.run, "RowTrainer", trainer)
    return arguments


@pytest.mark.scenario("R12.S1", on="pure")
def test_the_launchers_preflight_and_the_trainer_it_starts_see_the_same_contract(
    config, preflight_sees, trainer_gets
):
    run("launch", "--config", config, "--cpu", "--check-only")
    _, plan = preflight_sees["make_plan"]
    assert plan.learner.command[1:3] == ("-m", "coordexp")
    run(*plan.learner.command[3:], env=dict(plan.learner.env), code=1)
    contract = trainer_gets["steps"].rollout_matching_cfg
    assert type(contract) is RolloutContract
    assert set(preflight_sees) == {"make_plan", "model_problems", "port_problems", "memory_problems"}
    for part, (seen, _) in preflight_sees.items():
        assert type(seen) is RolloutContract, part
        assert seen == contract, part
    # Both see normalised and derived values, not those of the file.
    assert (contract.decode_mode, contract.vllm.sync.mode) == ("sampling", "full")
    assert (contract.vllm.max_model_len, contract.vllm.tensor_parallel_size) == (LENGTH, 1)
    # The plan is made from these values.
    listed = [(server.base_url, server.group_port) for server in contract.vllm.server.servers]
    assert [(server.base_url, server.group_port) for server in plan.servers] == listed
    assert all(not url.endswith("/") for url, _ in listed)
    assert {server.world_size for server in plan.servers} == {contract.vllm.tensor_parallel_size}


@pytest.mark.scenario("R12.C1", on="pure")
def test_only_the_schema_lists_rollout_keys_and_only_the_loader_makes_settings_of_a_file():
    """A consumer that reads the file or builds the section itself would have a contract of its own."""
    makers = {"RolloutMatching", "Settings", "VLLM", "ServerPool", "Offload"}
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        if SOURCE / "config" in file.parents or not re.search("|".join(makers | {"yaml_tree"}), text):
            continue
        tree = ast.parse(text)
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not makers & set(calls), file
        assert "Settings.model_validate" not in calls, file
        imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert "coordexp.config.yaml_tree" not in imported, file
    readers = {path for path in SOURCE.rglob("*.py") if re.search(r"\bload_settings\(", path.read_text())}
    commands = {SOURCE / f"cli/{name}.py" for name in ("check", "data", "launch", "plan", "serve", "train")}
    assert readers == commands | {SOURCE / "config/load.py"}
