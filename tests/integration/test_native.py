"""Native answers from the first step to the report: a model without coordinate tokens is trained, resumed exactly,
asked, and evaluated. Every part is real."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from coordexp.cli import app
from coordexp.correction import NativeAnswers
from coordexp.data import RecordFile
from coordexp.demo.model import Size, make_model
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.vocab import VocabularyError, VocabularyTable
from tests import zygote
from tests.source import SOURCE

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(480)
QUESTION = "Find all shapes."


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Return a folder with a tiny model without coordinate tokens, and scenes of one or two boxes."""
    folder = tmp_path_factory.mktemp("native")
    write_scenes(folder / "data", SceneSettings(objects=(1, 2), empty=0.1), train=30, val=6, seed=1)
    small = Size(hidden=64, layers=2, patch=8, vision_hidden=32)
    make_model(folder / "model", "small", coords=False, native=True, size=small)
    return folder


def config(parts: Path, name: str, data: str = "data", **training) -> Path:
    tree = yaml.safe_load((ROOT / "configs/stage1-native.yaml").read_text())
    tree = {key: tree[key] for key in ("custom", "stage1")}
    tree["custom"] |= {
        "prompt": QUESTION,
        "train_jsonl": str(parts / data / "train.jsonl"),
        "val_jsonl": str(parts / data / "val.jsonl"),
    }
    tree |= {
        "model": {"path": str(parts / "model"), "dtype": "float32"},
        "global_max_length": 512,
        "rollout_matching": {"rollout_backend": "hf", "decode_batch_size": 6, "max_new_tokens": 120},
        "training": {
            "output_dir": str(parts / name),
            "use_cpu": True,
            "max_steps": 8,
            "save_steps": 4,
            "logging_steps": 1,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 4,
            "packing": True,
            "packing_buffer": 32,
            "report_to": "none",
            **training,
        },
    }
    file = parts / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def run(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return zygote.run(["-m", "coordexp", "train", "--config", str(file), *options], env=environment, cwd=ROOT)


def train(file: Path, *options: str) -> str:
    done = run(file, *options)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    return done.stdout


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def call(*arguments: str):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def trained(parts):
    """Return the checkpoint of a run that learned two scenes by heart."""
    write_scenes(parts / "few", SceneSettings(objects=(1, 1)), train=2, val=1, seed=3)
    few = parts / "few"
    (few / "val.jsonl").write_text((few / "train.jsonl").read_text())
    settings = {"max_steps": 150, "save_steps": 150, "packing": False, "per_device_train_batch_size": 2}
    train(config(parts, "learned", "few", **settings, eval_strategy="steps", eval_steps=75))
    return parts / "learned/checkpoint-150"


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(parts):
    train(config(parts, "whole"))
    cut = config(parts, "cut", max_steps=4)
    train(cut)
    config(parts, "cut")
    train(cut, "--resume")
    whole, resumed = (load_file(parts / name / "checkpoint-8/model.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    losses = [[line["loss"] for line in metrics(parts / name) if "loss" in line] for name in ("whole", "cut")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8
    assert all("number_ce/ce" in line for line in metrics(parts / "whole") if "loss" in line)


def test_a_run_cannot_be_resumed_in_another_format(parts):
    file = config(parts, "switched", max_steps=2, save_steps=2)
    train(file)
    tree = yaml.safe_load(config(parts, "switched").read_text())
    tree["custom"].pop("answer_format")
    tree["stage1"]["pipeline"]["objective"].pop()
    make_model(parts / "with-coords", "small", size=Size(hidden=64, layers=2, patch=8, vision_hidden=32))
    tree["model"]["path"] = str(parts / "with-coords")
    file.write_text(yaml.safe_dump(tree))
    done = run(file, "--resume")
    assert done.returncode != 0
    assert "answer_format" in done.stderr


def test_a_trained_model_is_asked_and_evaluated_without_an_option(parts, trained):
    note = json.loads((trained / "coordexp.json").read_text())
    assert (note["prompt"], note["answer_format"]) == (QUESTION, "native")
    with pytest.raises(VocabularyError, match="coordinate tokens are missing"):
        VocabularyTable.from_folder(trained)
    data, preds = parts / "few/val.jsonl", parts / "preds.json"
    asked = call("predict", "--model", trained, "--data", data, "--out", preds, "--max-new-tokens", 120)
    assert asked.exit_code == 0, asked.output
    lines = [json.loads(line) for line in (parts / "preds.answers.jsonl").read_text().splitlines()]
    assert all(line["text"].startswith("```json\n[\n\t{") and line["text"].endswith("\n]\n```") for line in lines)
    assert {line["answer_format"] for line in lines} == {"native"}
    report = parts / "report.json"
    shown = call("evaluate", "--data", data, "--preds", preds, "--out", report)
    assert shown.exit_code == 0, shown.output
    evaluated = [line["eval_f1_50"] for line in metrics(parts / "learned") if "eval_f1_50" in line]
    assert len(evaluated) == 2
    assert evaluated[-1] == 1.0, lines
    objects = [item for line in lines for item in line["objects"]]
    assert all(0 < item["score"] <= 1 and item["reason"] is None for item in objects)
    answers = NativeAnswers(VocabularyTable.from_folder(trained, needs_coords=False))
    truth = [record.true_objects() for record in map(RecordFile(data).__getitem__, range(2))]
    written = [answers.table.text_of(answers.write((), objects).ids[:-1].tolist()) for objects in truth]
    assert [text.partition('"label"')[2] for text in written] == [
        line["text"].partition('"label"')[2] for line in lines
    ]


def test_other_options_are_refused_with_a_way_out(parts, trained):
    base = ("predict", "--model", trained, "--data", parts / "few/val.jsonl", "--out", parts / "other.json")
    wrong_format = call(*base, "--answer-format", "coord_tokens")
    assert wrong_format.exit_code != 0
    assert "coordinate tokens are missing" in " ".join(wrong_format.output.split())
    biased = call(*base, "--stop-bias", "1")
    assert biased.exit_code != 0
    assert "native answers have no such token" in " ".join(biased.output.split())


def test_records_with_polygons_are_refused_and_named(parts):
    write_scenes(parts / "polygons", SceneSettings(objects=(1, 1), polygons=1.0), train=3, val=1, seed=0)
    done = run(config(parts, "polygons-run", "polygons"))
    assert done.returncode != 0
    assert "is a polygon, and native answers have boxes only" in done.stderr
    assert "set custom.answer_format: coord_tokens" in done.stderr
