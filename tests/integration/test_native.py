"""Native answers from the first step to the report: a model without coordinate tokens is trained, resumed exactly,
asked, and evaluated. Every part is real."""

import json
from pathlib import Path

import pytest
import yaml

from coordexp.answers.formats import NativeAnswers
from coordexp.answers.table import VocabularyError, VocabularyTable
from coordexp.data import RecordFile
from coordexp.demo.model import Size, make_model
from coordexp.demo.scenes import SceneSettings, write_scenes
from tests.command import run
from tests.integration.stage2_runs import finish

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(480)
QUESTION = "Find all shapes."


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Return a folder with a tiny model without coordinate tokens, and two scenes, which are also held out."""
    folder = tmp_path_factory.mktemp("native")
    write_scenes(folder / "few", SceneSettings(objects=(1, 1)), train=2, val=1, seed=3)
    (folder / "few/val.jsonl").write_text((folder / "few/train.jsonl").read_text())
    small = Size(hidden=64, layers=2, patch=8, vision_hidden=32)
    make_model(folder / "model", "small", coords=False, native=True, size=small)
    return folder


def config(parts: Path) -> Path:
    tree = yaml.safe_load((ROOT / "configs/stage1-native.yaml").read_text())
    tree = {key: tree[key] for key in ("custom", "stage1")}
    tree["custom"] |= {
        "prompt": QUESTION,
        "train_jsonl": str(parts / "few/train.jsonl"),
        "val_jsonl": str(parts / "few/val.jsonl"),
    }
    tree |= {
        "model": {"path": str(parts / "model"), "dtype": "float32"},
        "global_max_length": 512,
        "rollout_matching": {"rollout_backend": "hf", "decode_batch_size": 6, "max_new_tokens": 120},
        "training": {
            "output_dir": str(parts / "learned"),
            "use_cpu": True,
            "max_steps": 150,
            "save_steps": 150,
            "eval_strategy": "steps",
            "eval_steps": 75,
            "logging_steps": 1,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 2,
            "packing": False,
            "report_to": "none",
        },
    }
    file = parts / "learned.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(parts):
    """Return the checkpoint of a run that learned two scenes by heart."""
    finish(["-m", "coordexp", "train", "--config", str(config(parts))])
    return parts / "learned/checkpoint-150"


def test_a_trained_model_is_asked_and_evaluated_without_an_option(parts, trained):
    note = json.loads((trained / "coordexp.json").read_text())
    assert (note["prompt"], note["answer_format"]) == (QUESTION, "native")
    with pytest.raises(VocabularyError, match="coordinate tokens are missing"):
        VocabularyTable.from_folder(trained)
    data, preds = parts / "few/val.jsonl", parts / "preds.json"
    run("predict", "--model", trained, "--data", data, "--out", preds, "--max-new-tokens", 120)
    lines = [json.loads(line) for line in (parts / "preds.answers.jsonl").read_text().splitlines()]
    assert all(line["text"].startswith("```json\n[\n\t{") and line["text"].endswith("\n]\n```") for line in lines)
    assert {line["answer_format"] for line in lines} == {"native"}
    report = parts / "report.json"
    run("evaluate", "--data", data, "--preds", preds, "--out", report)
    evaluated = [line["eval_f1_50"] for line in metrics(parts / "learned") if "eval_f1_50" in line]
    assert len(evaluated) == 2
    assert evaluated[-1] == 1.0, lines
    assert all("number_ce/ce" in line for line in metrics(parts / "learned") if "loss" in line)
    objects = [item for line in lines for item in line["objects"]]
    assert all(0 < item["score"] <= 1 and item["reason"] is None for item in objects)
    answers = NativeAnswers(VocabularyTable.from_folder(trained, needs_coords=False))
    truth = [record.true_objects() for record in map(RecordFile(data).__getitem__, range(2))]
    written = [answers.table.text_of(answers.write((), objects).ids[:-1].tolist()) for objects in truth]
    assert [text.partition('"label"')[2] for text in written] == [
        line["text"].partition('"label"')[2] for line in lines
    ]
