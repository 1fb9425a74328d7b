"""Clauses about the whole program: the options of commands, the imports of packages, the readers of settings."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from coordexp.cli import app
from coordexp.config.schema import leaves
from tests.source import SOURCE

PACKAGE = SOURCE / "coordexp"
ROOT = Path(__file__).parents[2]


@pytest.mark.scenario("R05.C9", "R06.C5", "R18.C1", "R34.C2", on="pure")
@pytest.mark.parametrize("name", ["train", "serve", "launch"])
def test_no_setting_is_an_option_of_a_command_that_trains_or_serves(name: str) -> None:
    """Hyperparameters are settings of the config. Options say where and whether to run; `--set` changes the config
    itself for one run."""
    group: Any = typer.main.get_command(app)
    options = {word.lstrip("-").replace("-", "_") for param in group.commands[name].params for word in param.opts}
    settings = {str(path[-1]) for path, _ in leaves()}
    assert "packing_buffer" in settings and "learning_rate" in settings
    assert "config" in options
    assert not options & settings


@pytest.mark.scenario("R08.C1", "R08.C3", on="pure")
def test_a_server_has_no_code_that_reads_data_or_corrects_answers() -> None:
    """The learner owns the data iterator, parses, matches, corrects, packs and trains. A server imports no code
    that does this, directly or indirectly."""
    modules = _modules_reached_from("coordexp.servers.app")
    assert "coordexp.servers.app" in modules
    owned = ("coordexp.train", "coordexp.answers.", "coordexp.objective")
    assert {name for name in modules if name.startswith(owned)} == {"coordexp.answers.table"}


@pytest.mark.scenario("R35.C1", on="pure")
@pytest.mark.parametrize("module", ["coordexp.objective.pipeline", "coordexp.rollout.backend"])
def test_a_contract_is_importable_without_the_trainer(module: str) -> None:
    code = (
        f"import {module}, sys;"
        "assert not [name for name in sys.modules if name.startswith('coordexp.train')], sys.modules"
    )
    _run_python(code)


@pytest.mark.scenario("R28.C4", on="pure")
def test_transport_plans_are_made_without_torch_so_that_no_gradient_can_flow_through_them() -> None:
    _run_python("import coordexp.answers.transport, sys; assert 'torch' not in sys.modules")


@pytest.mark.scenario("R36.C1", on="pure")
@pytest.mark.parametrize("module", ["trainer", "encode", "stream", "evaluation"])
def test_a_training_step_knows_the_backend_by_its_interface_alone(module: str) -> None:
    """It imports no implementation, and does not read which one was chosen."""
    tree = ast.parse((PACKAGE / f"train/{module}.py").read_text())
    implementations = (
        "coordexp.rollout.colocate",
        "coordexp.rollout.start",
        "coordexp.servers",
        "coordexp.rollout.hugging_face",
    )
    assert not [name for name in _imports(tree, f"coordexp.train.{module}") if name.startswith(implementations)]
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not read & {"rollout_backend", "vllm"}


@pytest.mark.scenario("R35.C2", on="pure")
def test_the_trainer_module_uses_no_parsing_matching_packing_or_backend_code() -> None:
    """The trainer handles rows and interfaces. The code that makes them is in other packages."""
    imported = set(_imports(_tree("coordexp.train.trainer"), "coordexp.train.trainer"))
    owners = ("parse", "match", "correct", "segment", "target")
    engines = {"coordexp.rollout.colocate", "coordexp.rollout.hugging_face"}
    assert "coordexp.rollout.backend" in imported
    assert not imported & (engines | {f"coordexp.answers.{owner}" for owner in owners})
    packing = {"CarryBuffer", "select"}
    assert not imported & {f"coordexp.objective.carry.{name}" for name in packing}


@pytest.mark.scenario("R34.C3", on="pure")
def test_no_config_or_document_says_that_the_guard_is_for_hugging_face_alone() -> None:
    files = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "configs").rglob("*.yaml"),
        *(ROOT / "examples").rglob("*.yaml"),
        PACKAGE / "config/rollout.py",
        PACKAGE / "config/load.py",
    ]
    sentences = [
        sentence for file in files for sentence in re.split(r"[.:;|]\s", file.read_text().replace("\n", " "))
    ]
    on_guard = [sentence for sentence in sentences if re.search(r"repeat_terminate|[Rr]epeat guard", sentence)]
    assert len(on_guard) > 5
    limiting = re.compile(r"\b(only|alone|ignored|ignores)\b[^.]*\b(hf|Hugging Face|vLLM|vllm)\b|\bHF-only\b")
    assert not [sentence for sentence in on_guard if limiting.search(sentence)]


@pytest.mark.scenario("R11.C2", on="pure")
def test_only_commands_load_settings_and_rollout_code_reads_no_file() -> None:
    """Training, rollouts and servers get settings as values, and cannot read them from a file of their own."""
    readers = {
        name
        for name in _modules()
        if {"coordexp.config.load", "coordexp.config.yaml_tree"} & set(_imports(_tree(name), name))
        or "load_settings" in _names(_tree(name))
    }
    rollout_aware = (
        "coordexp.train",
        "coordexp.rollout",
        "coordexp.servers",
        "coordexp.objective",
    )
    assert "coordexp.cli.train" in readers
    assert not [name for name in readers if name.startswith(rollout_aware)]


def _run_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(SOURCE)})


def _modules_reached_from(start: str) -> set[str]:
    """Return the modules of coordexp that importing `start` can reach, imports inside functions included. The
    package itself is not followed: it imports the detector only when that is asked for."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        known = set(_modules())
        waiting += [other for other in _imports(_tree(name), name) if other in known - {"coordexp"}]
    return reached


def _imports(tree: ast.Module, name: str) -> Iterator[str]:
    """Yield the modules that a module imports; `from a import b` is both `a` and, if it is a module, `a.b`."""
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level], name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _names(tree: ast.Module) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _tree(name: str) -> ast.Module:
    return ast.parse(_modules()[name].read_text())


def _modules() -> dict[str, Path]:
    """Return the files of coordexp by module name."""
    files = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files
