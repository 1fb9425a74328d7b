"""A run on data with broken images, of which it may leave some out: it ends, lists them, and can be resumed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from tests.integration.stage1_runs import config, make_parts, train
from tests.integration.stage2_runs import metrics, started, training, weights

pytestmark = pytest.mark.timeout(240)
BROKEN = {  # six kinds, by the number of the record
    3: lambda file: file.unlink(),
    7: lambda file: file.write_bytes(b""),
    12: lambda file: file.write_bytes(file.read_bytes()[:-40]),
    18: lambda file: file.write_bytes(b"<html>404</html>"),
    25: lambda file: Image.new("RGB", (32, 200)).save(file),
    33: lambda file: file.write_bytes(file.read_bytes()[:60] + bytes(200)),
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    parts = make_parts(tmp_path_factory.mktemp("quarantine"))
    records = [json.loads(line) for line in (parts / "data/train.jsonl").read_text().splitlines()]
    for number, damage in BROKEN.items():
        damage(parts / "data" / records[number]["image"])
    return parts


def run_config(parts: Path, name: str, share: float) -> Path:
    """Write the config of a run that takes all 40 records, in eight steps of six samples."""
    file = config(parts, name, save_steps=3)
    tree = yaml.safe_load(file.read_text())
    tree["custom"]["broken_images"] = share
    file.write_text(yaml.safe_dump(tree))
    return file


def test_a_run_leaves_broken_images_out_and_a_resumed_one_takes_the_same_records(parts):
    shown = train(run_config(parts, "whole", 0.2))
    listed = [json.loads(line) for line in (parts / "whole/quarantine.jsonl").read_text().splitlines()]
    assert sorted(line["record"] for line in listed) == sorted(BROKEN)
    assert {line["problem"] for line in listed} == {"image-missing", "image-unreadable", "size-mismatch"}
    assert "quarantine.jsonl" in shown
    shutil.copytree(parts / "whole", parts / "cut")
    for checkpoint in sorted((parts / "cut").glob("checkpoint-*")):
        if checkpoint.name != "checkpoint-3":
            shutil.rmtree(checkpoint)
    (parts / "cut/quarantine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in listed[:2]))
    assert "checkpoint-3" in train(run_config(parts, "cut", 0.2), "--resume")
    assert len([line for line in metrics(parts / "whole") if "loss" in line]) == 8
    assert metrics(parts / "cut") == metrics(parts / "whole")
    ends = [weights(parts / name / "checkpoint-8") for name in ("whole", "cut")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_without_the_setting_the_first_broken_image_ends_the_run_with_its_line(parts):
    with started(training(run_config(parts, "strict", 0.0))) as run:
        assert run.wait(120) == 1
    assert not (parts / "strict/quarantine.jsonl").exists()
