"""A very small study from nothing to its table: real training from the model of the example."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import zygote

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
NUMBERS = ("--steps", "2", "--seeds", "0")


def study(
    folder: Path, command: str, *options: str, regime: Sequence[str] = ("--regime", "few")
) -> subprocess.CompletedProcess[str]:
    arguments = ["tools/study.py", command, "--out", str(folder), *regime, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return zygote.run(arguments, cwd=ROOT, env=environment, timeout=800, check=True)


def test_a_small_study_trains_variants_side_by_side_and_compares_them(tmp_path):
    study(tmp_path, "data", "--train", "32", "--held-out", "8")
    variants = ("--variant", "continued", "in-order", "--eval-every", "2", "--jobs", "2")
    made = study(tmp_path, "run", *variants, *NUMBERS)
    assert made.stderr.count(": train") == 2 and made.stderr.count(": predict") == 2
    study(tmp_path, "answer", "--of", "in-order", "--name", "dedup", "--predict=--dedup 0.5", *NUMBERS)
    table = study(tmp_path, "table", "--svg", str(tmp_path / "curves.svg"), "--steps", "2").stdout
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("|")}
    assert {"continued", "in-order", "dedup"} <= set(rows)
    assert " 0 | 0 |" in next(line for line in table.splitlines() if line.startswith("| continued"))
    assert "difference to continued" in rows
    assert "in-order" in (tmp_path / "curves.svg").read_text()
    assert study(tmp_path, "run", *variants, *NUMBERS).stderr == "", "a complete run is not repeated"


def test_one_command_makes_the_headline_from_nothing(tmp_path):
    small = ("--train", "32", "--held-out", "8", "--start-steps", "2", "--steps", "2")
    table = study(tmp_path, "headline", *small, regime=()).stdout
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    trained = ["continued", "continued-dedup", "recommended", "recommended-dedup"]
    assert [row for row in rows if "start" in row][:3] == ["before start", "start", "start, complete labels"]
    assert [row for row in rows if row in trained][:4] == trained
    assert "difference to continued" in rows
