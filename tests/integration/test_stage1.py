"""Stage 1 with transformers, peft, two processes and signals, on a tiny model and drawn scenes."""

import json
import os
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from coordexp.config import World, load_settings
from coordexp.demo.scenes import SceneSettings
from coordexp.tasks import ignore
from coordexp.train.checkpoints import newest_intact, write_manifest
from coordexp.train.run import prepare
from coordexp.train.stream import RowStream
from tests.integration.servers import wait_for
from tests.integration.stage1_runs import config, make_parts, ran, train
from tests.integration.stage2_runs import metrics, started, training, weights

pytestmark = pytest.mark.timeout(480)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    scenes = SceneSettings(objects=(1, 3), polygons=0.3, empty=0.1)
    return make_parts(tmp_path_factory.mktemp("stage1"), scenes)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(parts):
    """The run has packing, waiting segments at the checkpoint, and an adapter with dropout."""
    settings = {"adapter": {"rank": 4, "alpha": 8, "dropout": 0.2}}
    train(config(parts, "whole", **settings))
    assert "0.ids" in load_file(parts / "whole/checkpoint-4/carry_0.safetensors")
    shutil.copytree(parts / "whole", parts / "cut")
    shutil.rmtree(parts / "cut/checkpoint-8")
    assert "checkpoint-4" in train(config(parts, "cut", **settings), "--resume")
    expected, actual = (
        weights(parts / name / "checkpoint-8", "adapter_model.safetensors") for name in ("whole", "cut")
    )
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    losses = [[line["loss"] for line in metrics(parts / name) if "loss" in line] for name in ("whole", "cut")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8


LEARNS = {
    "max_steps": 30,
    "learning_rate": 5e-3,
    "eval_strategy": "steps",
    "eval_steps": 15,
    "save_steps": 30,
    "report_to": "tensorboard",
}


@pytest.fixture(scope="module")
def learned(parts):
    """Return the folder of a run of 30 steps, and the records of its log."""
    done = ran(config(parts, "learns", **LEARNS), "--resume", "--log-format", "json")
    assert done.returncode == 0, done.stderr
    return parts / "learns", [json.loads(line) for line in done.stderr.splitlines()]


def test_a_run_learns_and_says_what_it_did(learned):
    folder, records = learned
    lines = metrics(folder)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert [line["step"] for line in lines if "eval_f1_50" in line] == [15, 30]
    assert (folder / "evaluations/step-30.json").is_file()
    assert list(folder.glob("runs/*/events.out.tfevents.*"))
    described = json.loads((folder / "run.json").read_text())[0]
    assert described["data"]["train"]["records"] == 40
    assert described["objective"]["terms"]
    assert described["packages"]["transformers"]
    assert yaml.safe_load((folder / "resolved.yaml").read_text())["training"]["max_steps"] == 30
    assert f'coordexp_learner_step{{run="{folder}"}} 30\n' in (folder / "metrics.prom").read_text()
    assert {record["level"] for record in records} <= {"info", "warning"}
    messages = " ".join(record["message"] for record in records)
    assert "from the beginning" in messages and "step 30/30" in messages


def test_a_finished_run_is_neither_trained_further_nor_overwritten(learned):
    folder, _ = learned
    file = folder.with_suffix(".yaml")
    resumed, again = ran(file, "--resume"), ran(file)
    assert (resumed.returncode, again.returncode) == (0, 1)
    assert "resuming from" in resumed.stderr and "missing" not in resumed.stderr  # tied weights
    for line in resumed.stderr.splitlines():
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (INFO|WARNING) ", line), line
    assert "already holds checkpoint-30" in again.stderr and "--resume" in again.stderr
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-30"]


def write_shards(parts: Path) -> Path:
    """Write the training records to three files and the held-out ones to two, in two folders with images of their
    own. Return the folder with all of them."""
    folder = parts / "shards"
    for name, bounds in (("train", (0, 13, 20, 40)), ("val", (0, 2, 6))):
        lines = (parts / f"data/{name}.jsonl").read_text().splitlines(keepends=True)
        for k, (begin, end) in enumerate(pairwise(bounds)):
            file = folder / ("later" if k == len(bounds) - 2 else "early") / f"{name}-{k}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(lines[begin:end]))
            for line in lines[begin:end]:
                image = Path(json.loads(line)["image"])
                (file.parent / image).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(parts / "data" / image, file.parent / image)
    return folder


def with_data(file: Path, **custom) -> Path:
    tree = yaml.safe_load(file.read_text())
    tree["custom"] |= custom
    file.write_text(yaml.safe_dump(tree))
    return file


def test_a_run_in_mixed_precision_moves_its_weights_as_a_float32_run_does_and_states_their_dtype(parts):
    """At this learning rate, nine of ten weights of 16 bits would never move."""
    steps = {"max_steps": 50, "save_steps": 25, "learning_rate": 1e-5, "warmup_steps": 0}
    train(config(parts, "exact", **steps))
    train(config(parts, "mixed", dtype="bfloat16", bf16=True, **steps))
    shutil.rmtree(parts / "mixed/checkpoint-50")
    train(parts / "mixed.yaml", "--resume")
    before = weights(parts / "model")
    exact, mixed = (weights(parts / name / "checkpoint-50") for name in ("exact", "mixed"))
    assert {weight.dtype for weight in mixed.values()} == {torch.float32}
    moved = torch.cat([(exact[name] - before[name]).flatten() for name in before])
    apart = torch.cat([(mixed[name] - exact[name]).flatten() for name in before])
    assert apart.norm() / moved.norm() < 0.05
    stated = json.loads((parts / "mixed/checkpoint-50/config.json").read_text())
    assert stated["dtype"] == stated["text_config"]["dtype"] == stated["vision_config"]["dtype"] == "bfloat16"


def test_sigterm_saves_and_exits_zero_and_the_run_can_go_on_and_meanwhile_no_second_one_starts(parts):
    file = config(parts, "stopped", max_steps=4000, save_steps=4000)
    log = parts / "stopped/metrics.jsonl"
    with started(training(file)) as run:
        wait_for(lambda: log.is_file() and log.read_text().count("\n") > 2, 100, lambda: run.shown)
        second = ran(file, "--resume")
        run.process.terminate()
        assert run.wait(60) == 0, run.shown
        shown = run.shown
    assert "stopped by a signal" in shown
    assert second.returncode == 1
    assert f"in use by a run: process {run.process.pid} on " in second.stderr
    (checkpoint,) = (parts / "stopped").glob("checkpoint-*")
    step = int(checkpoint.name.split("-")[1])
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == [*range(1, step + 1), step], "each step once, and a line about all"
    config(parts, "stopped", max_steps=step + 2)
    assert f"step {step + 2}" in train(file, "--resume")


@pytest.mark.cold
def test_two_processes_on_several_files_train_as_one_does_on_the_same_samples_in_one_file(parts):
    """In file order and without packing, two ranks of three samples take the same samples as one rank of six."""
    same = {
        "packing": False,
        "train_sampling_strategy": "sequential",
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    folder = write_shards(parts)
    shards = {"train_jsonl": str(folder / "*/train-*.jsonl"), "val_jsonl": [str(folder / "*/val-*.jsonl")]}
    train(config(parts, "one", per_device_train_batch_size=6, **same))
    train(with_data(config(parts, "two", per_device_train_batch_size=3, **same), **shards), processes=2)
    expected, actual = (weights(parts / name / "checkpoint-3") for name in ("one", "two"))
    for name in expected:
        assert torch.allclose(expected[name], actual[name], rtol=1e-3, atol=1e-5), name
    assert [line["loss"] for line in metrics(parts / "two") if "loss" in line] == pytest.approx(
        [line["loss"] for line in metrics(parts / "one") if "loss" in line], rel=1e-4
    )
    answers = [(parts / name / "evaluations/step-3.answers.jsonl").read_text() for name in ("one", "two")]
    assert answers[0].count("\n") == answers[1].count("\n") == 6
    evaluated = [[line for line in metrics(parts / name) if "eval_f1_50" in line] for name in ("one", "two")]
    assert len(evaluated[0]) == len(evaluated[1]) == 1
    described = json.loads((parts / "two/run.json").read_text())[0]["data"]
    assert [file["records"] for file in described["train"]["files"]] == [13, 7, 20]
    assert [file["records"] for file in described["val"]["files"]] == [2, 4]


def test_an_older_checkpoint_goes_only_when_the_newer_one_is_whole(parts, monkeypatch):
    file = config(parts, "rotated", max_steps=3, save_steps=1, save_total_limit=1)
    whole, saved = RowStream.save, []

    def save(self, folder):
        saved.append(folder.name)
        if len(saved) == 3:
            raise OSError("no space left")
        whole(self, folder)

    monkeypatch.setattr(RowStream, "save", save)
    prepared = prepare(load_settings(file, World(1)))
    with pytest.raises(OSError, match="no space left"):
        prepared.run()
    assert sorted(path.name for path in (parts / "rotated").glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-3",
    ]
    assert newest_intact(parts / "rotated", ignore).name == "checkpoint-2"


def test_code_that_is_hidden_in_a_checkpoint_is_not_run(parts, tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    prepare(load_settings(config(parts, "hidden", max_steps=1, save_steps=1), World(1))).run()
    file, checkpoint = config(parts, "hidden", max_steps=2, save_steps=1), parts / "hidden/checkpoint-1"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        sound = (checkpoint / name).read_bytes()
        torch.save({"state": Payload()}, checkpoint / name)
        write_manifest(checkpoint, ignore)  # as an attacker would, because the hash is another one now
        with pytest.raises(Exception, match="Weights only load failed"):
            prepare(load_settings(file, World(1)), checkpoint).run()
        assert not (tmp_path / "run").exists()
        (checkpoint / name).write_bytes(sound)


def make_thin(data: Path) -> None:
    """Give the fourth record an image that is too thin for the model."""
    lines = (data / "train.jsonl").read_text().splitlines()
    record = json.loads(lines[3]) | {"width": 1000, "height": 2, "objects": []}
    Image.new("RGB", (1000, 2)).save(data / record["image"])
    (data / "train.jsonl").write_text("\n".join([*lines[:3], json.dumps(record), *lines[4:]]))


def test_a_fault_of_the_data_is_told_without_a_traceback(parts, tmp_path):
    shutil.copytree(parts / "data", tmp_path / "data")
    make_thin(tmp_path / "data")
    settings = {"packing": False, "per_device_train_batch_size": 16, "train_sampling_strategy": "sequential"}
    file = with_data(config(parts, "thin", **settings), train_jsonl=str(tmp_path / "data/train.jsonl"))
    done = ran(file)
    assert done.returncode == 1
    assert "0000003.png" in done.stderr and "1000 x 2: " in done.stderr
    assert "Traceback" not in done.stderr
