"""A very small study from nothing to its table: real training, also from random weights."""

import os
from pathlib import Path

import pytest

from tests import zygote

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


def make(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = ["tools/study.py", *arguments]
    return zygote.run(command, cwd=ROOT, env=environment, timeout=1700, check=True).stdout


def list_rows(table: str) -> list[str]:
    return [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]


def test_one_command_makes_the_headline_from_nothing(tmp_path):
    rows = list_rows(make("headline", "--out", str(tmp_path), "--size", "trial"))
    made = ["before the start", "start", "continued", "recommended", "complete labels: start"]
    assert [row for row in rows if row in made][: len(made)] == made
    assert "difference to continued" in rows


@pytest.mark.cold  # entry points of other packages are read while coordexp is imported
def test_every_kind_of_arm_is_made_from_a_base_that_has_seen_no_complete_labels(tmp_path):
    arms = ["self-training-1", "closing", "offline", "agreement", "interpolated"]
    options = ["--out", str(tmp_path), "--size", "trial", "--regimes", "by-size", "--seeds", "1"]
    for _ in range(2):  # the second time, there is nothing left to do
        make("run", *options, "--arms", *arms)
    rows = list_rows(make("table", "--out", str(tmp_path)))
    made = ["before the start", "start", "continued", *arms]
    assert {row for row in rows if row in made} == set(made)
    config = (tmp_path / "by-size/1/start/config.yaml").read_text()
    assert str(tmp_path / "base/many/run") in config
    assert (tmp_path / "by-size/1/self-training-1/completed.jsonl").is_file()
