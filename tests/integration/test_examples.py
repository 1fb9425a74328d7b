"""The example's own commands, at a reduced size, from nothing to a measured model."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
README = (ROOT / "examples/scenes-cpu/README.md").read_text()
SMALLER = {"--train 20000 --val 200": "--train 60 --val 6", "checkpoint-7000": "checkpoint-6"}


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.strip().splitlines()]


@pytest.mark.timeout(400)
def test_every_command_of_the_example_runs(tmp_path):
    found = commands()
    assert len(found) == 7
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    training = {"max_steps": 6, "save_steps": 6, "eval_steps": 6, "report_to": "none"}
    small = {"extends": ["configs/demo/scenes-cpu.yaml"], "training": training}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small))
    for command in found:
        for large, reduced in SMALLER.items():
            command = command.replace(large, reduced)
        words = shlex.split(command.replace("configs/demo/scenes-cpu.yaml", "small.yaml"))
        assert words[0] == "coordexp"
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert (tmp_path / "scenes/evaluate.html").is_file()
    assert "f1" in done.stdout.lower()
