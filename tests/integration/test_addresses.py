"""Training on images that are files, parts of local tars, or in a store: the same run, also when it is resumed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.integration.stage1_runs import config, make_parts, train
from tests.integration.stage2_runs import metrics, weights
from tests.unit.data.addressed import pack_tar, rewrite

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return make_parts(tmp_path_factory.mktemp("addresses"))


def run_config(parts: Path, name: str, data: str) -> Path:
    """Write the config of a run of four steps on the records `data`, with an evaluation at its end."""
    file = config(parts, name, max_steps=4, save_steps=2, eval_strategy="steps", eval_steps=4)
    tree = yaml.safe_load(file.read_text())
    for part in ("train", "val"):
        tree["custom"][f"{part}_jsonl"] = str(parts / f"data/{part}{data}.jsonl")
    file.write_text(yaml.safe_dump(tree))
    return file


def check_equal(run: Path, expected: Path) -> None:
    """Check that two runs have the same losses and evaluations, and end with the same weights."""
    assert len([line for line in metrics(expected) if "loss" in line]) == 4
    assert metrics(run) == metrics(expected)
    ends = [weights(folder / "checkpoint-4") for folder in (run, expected)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def train_in_two_parts(parts: Path, name: str, data: str) -> tuple[Path, Path]:
    """Train four steps at once, and train the last two again from the checkpoint in the middle. Return the folders
    of both runs."""
    train(run_config(parts, name, data))
    shutil.copytree(parts / name, parts / f"{name}-cut")
    shutil.rmtree(parts / f"{name}-cut/checkpoint-4")
    assert "checkpoint-2" in train(run_config(parts, f"{name}-cut", data), "--resume")
    return parts / name, parts / f"{name}-cut"


@pytest.fixture(scope="module")
def on_files(parts):
    whole, cut = train_in_two_parts(parts, "files", "")
    check_equal(cut, whole)
    return whole


def test_a_run_on_tars_equals_one_on_files_also_when_it_is_resumed(parts, on_files):
    for part in ("train", "val"):
        file = parts / f"data/{part}.jsonl"
        packed = rewrite(file, f"{part}-tar.jsonl", pack_tar(file, f"{part}.tar").__getitem__)
        assert "#bytes=" in json.loads(packed.read_text().splitlines()[0])["image"]
    for run in train_in_two_parts(parts, "tars", "-tar"):
        check_equal(run, on_files)
