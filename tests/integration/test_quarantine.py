"""A run on data with broken images, of which it may leave some out: it ends, lists them, and can be resumed."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from coordexp.demo.model import make_model
from coordexp.demo.scenes import SceneSettings, write_scenes
from tests.integration.stage1_runs import TINY, config, make_parts, train
from tests.integration.stage2_runs import metrics, started, training, weights
from tests.unit.data.addressed import pack_tar

pytestmark = pytest.mark.timeout(240)
DAMAGES: tuple[Callable[[Path], object], ...] = (
    lambda file: file.unlink(),
    lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(file.read_bytes()[:-40]),
    lambda file: file.write_bytes(b"<html>404</html>"),
    lambda file: Image.new("RGB", (32, 200)).save(file),
    lambda file: file.write_bytes(file.read_bytes()[:60] + bytes(200)),
)
BROKEN = dict(zip((3, 7, 12, 18, 25, 33), DAMAGES, strict=True))  # by the number of the record
IMAGES = int(os.environ.get("COORDEXP_QUARANTINE_IMAGES", "20000"))
TARS = 20


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
    cut_at(parts / "whole", parts / "cut", 3)
    (parts / "cut/quarantine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in listed[:2]))
    assert "checkpoint-3" in train(run_config(parts, "cut", 0.2), "--resume")
    assert len([line for line in metrics(parts / "whole") if "loss" in line]) == 8
    assert metrics(parts / "cut") == metrics(parts / "whole")
    ends = [weights(parts / name / "checkpoint-8") for name in ("whole", "cut")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def cut_at(run: Path, cut: Path, step: int) -> None:
    """Copy a run folder as if the run had ended after the checkpoint of a step."""
    shutil.copytree(run, cut)
    for checkpoint in cut.glob("checkpoint-*"):
        if int(checkpoint.name.partition("-")[2]) > step:
            shutil.rmtree(checkpoint)


def write_tars(folder: Path, broken: dict[int, Callable[[Path], object]]) -> None:
    """Move the images of the training data to tars, one per part of the records, after some were damaged."""
    data = folder / "data"
    records = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    for tar in range(TARS):
        part = range(len(records) * tar // TARS, len(records) * (tar + 1) // TARS)
        for number in broken.keys() & set(part):
            if broken[number] is not DAMAGES[0]:  # the place of a missing one is behind the end of the tar
                broken[number](data / records[number]["image"])
        file = data / f"part-{tar:02}.jsonl"
        file.write_text("".join(json.dumps(records[number]) + "\n" for number in part))
        places = pack_tar(file, f"{tar:02}.tar")
        for number in part:
            name = records[number]["image"]
            is_missing = broken.get(number) is DAMAGES[0]
            records[number]["image"] = f"{tar:02}.tar#bytes=999999999:100" if is_missing else places[name]
        file.write_text("".join(json.dumps(records[number]) + "\n" for number in part))
    shutil.rmtree(data / "images/train")


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_20_000_images_in_20_tars_of_which_a_hundred_are_broken_train_to_the_end_and_resume_exactly(tmp_path):
    """Steps of a hundred samples take all records once. The step from which the run is resumed is drawn."""
    chance = random.Random(5)
    write_scenes(tmp_path / "data", SceneSettings(side=32, objects=(1, 2)), train=IMAGES, val=2, seed=3)
    make_model(tmp_path / "model", "small", ordinal=True, size=TINY)
    numbers = sorted(chance.sample(range(IMAGES), IMAGES // 200))
    write_tars(tmp_path, {number: DAMAGES[k % len(DAMAGES)] for k, number in enumerate(numbers)})

    def write_config(name: str) -> Path:
        steps = {"max_steps": IMAGES // 100, "save_steps": IMAGES // 2000, "save_total_limit": 1000}
        batch = {"per_device_train_batch_size": 50, "gradient_accumulation_steps": 2, "eval_strategy": "no"}
        file = config(tmp_path, name, **steps, **batch)
        tree = yaml.safe_load(file.read_text())
        tree["custom"] |= {"broken_images": 0.01, "train_jsonl": str(tmp_path / "data/part-*.jsonl")}
        kept = {key: value for key, value in tree["training"].items() if not key.startswith("packing")}
        tree["training"] = kept | {"packing": False}
        file.write_text(yaml.safe_dump(tree))
        return file

    train(write_config("whole"))
    listed = [
        json.loads(line)["record"] for line in (tmp_path / "whole/quarantine.jsonl").read_text().splitlines()
    ]
    assert sorted(listed) == numbers
    last = IMAGES // 100
    step = chance.randrange(1, 20) * last // 20
    cut_at(tmp_path / "whole", tmp_path / "cut", step)
    assert f"checkpoint-{step}" in train(write_config("cut"), "--resume")
    assert len([line for line in metrics(tmp_path / "whole") if "loss" in line]) == last
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    ends = [weights(tmp_path / name / f"checkpoint-{last}") for name in ("whole", "cut")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_without_the_setting_the_first_broken_image_ends_the_run_with_its_line(parts):
    with started(training(run_config(parts, "strict", 0.0))) as run:
        assert run.wait(120) == 1
    assert not (parts / "strict/quarantine.jsonl").exists()
