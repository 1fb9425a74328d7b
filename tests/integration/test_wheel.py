"""A wheel, as a user installs it, in an environment that has nothing else."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path.cwd()


@pytest.mark.full
@pytest.mark.timeout(480)
def test_a_wheel_installs_into_an_empty_environment_and_checks_configs_there(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # test the wheel only

    def run(*command: str, code: int = 0) -> str:
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
        assert result.returncode == code, f"{command}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert all(name.startswith("coordexp") for name in names)
    assert {"coordexp/py.typed", "coordexp/pages/assets/page.css", "coordexp/pages/templates/page.html"} <= set(
        names
    )

    run(sys.executable, "-m", "venv", "empty")
    run("empty/bin/python", "-m", "pip", "install", "-qq", "-c", str(ROOT / "constraints.txt"), str(wheel))
    installed = json.loads(run("empty/bin/python", "-m", "pip", "list", "--format", "json"))
    assert not {"torch", "transformers", "vllm"} & {package["name"].lower() for package in installed}
    commit = run("git", "-C", str(ROOT), "rev-parse", "HEAD")
    assert f"(commit {commit[:12]}" in run("empty/bin/coordexp", "--version")
    run("empty/bin/coordexp", "check", "--config", str(ROOT / "configs/stage2-server-3v1.yaml"))
    shown = run("empty/bin/coordexp", "check", "--config", str(ROOT / "examples/check/ten-mistakes.yaml"), code=2)
    assert "7 problems" in shown
