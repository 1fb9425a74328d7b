"""A very small study from nothing to its table: real training from the model of the example."""

import os
from pathlib import Path

import pytest

from tests import zygote

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_one_command_makes_the_headline_from_nothing(tmp_path):
    small = ["--train", "32", "--held-out", "8", "--start-steps", "2", "--steps", "2"]
    command = ["tools/study.py", "headline", "--out", str(tmp_path), *small]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    table = zygote.run(command, cwd=ROOT, env=environment, timeout=800, check=True).stdout
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    trained = ["continued", "continued-dedup", "recommended", "recommended-dedup"]
    assert [row for row in rows if "start" in row][:3] == ["before start", "start", "start, complete labels"]
    assert [row for row in rows if row in trained][:4] == trained
    assert "difference to continued" in rows
