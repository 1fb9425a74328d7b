"""Runs on questions beside records with objects: Stage 1 and Stage 2, with a real model, resumed exactly."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from coordexp.demo.scenes import SceneSettings, write_scenes
from tests.integration.stage2_runs import (
    ROOT,
    config,
    finish,
    metrics,
    specified_settings,
    steps,
    training,
    weights,
)
from tests.unit.config.trees import CHAT_CE

pytestmark = pytest.mark.timeout(480)
ALONE = [{"question": f"What is {k} and {k}?", "answer": str(2 * k)} for k in range(9)]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Draw scenes with questions, and write others without an image."""
    folder = tmp_path_factory.mktemp("chat")
    write_scenes(folder / "data", SceneSettings(objects=(1, 2)), train=40, val=6, seed=1, questions=2)
    (folder / "alone.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ALONE))
    return folder


def mixed(folder: Path, **changes) -> dict:
    """Return the settings of a mixture of scenes, questions about them, and questions without an image."""
    pipeline = specified_settings()["pipeline"]
    pipeline["objective"] = [*pipeline["objective"], CHAT_CE]
    data = [
        {"name": "scenes", "path": str(folder / "data/train.jsonl"), "weight": 0.5, "prompt": "Find all."},
        {"name": "questions", "path": str(folder / "data/train.questions.jsonl"), "weight": 0.3},
        {"name": "alone", "path": str(folder / "alone.jsonl"), "weight": 0.2},
    ]
    held_out = [
        {"name": "questions", "path": str(folder / "data/val.questions.jsonl"), "max_new_tokens": 4},
        {"name": "alone", "path": str(folder / "alone.jsonl"), "max_new_tokens": 4},
    ]
    return {
        "custom__train_jsonl": None,
        "custom__train_data": data,
        "custom__eval_data": held_out,
        "rollout_matching__pipeline": pipeline,
        "training__max_steps": 6,
        "training__save_steps": 3,
        "training__eval_strategy": "steps",
        "training__lr_scheduler_type": "constant",
        "training__eval_steps": 6,
        **changes,
    }


def test_a_mixed_run_trains_on_questions_in_every_step_and_is_resumed_bit_for_bit(parts):
    given = mixed(parts, custom__trainer_variant="stage2_two_channel", stage2__b_ratio=0.5)
    finish(training(config(parts, "whole", **given)))
    shutil.copytree(parts / "whole", parts / "cut")
    shutil.rmtree(parts / "cut/checkpoint-6")
    assert "checkpoint-3" in finish(training(config(parts, "cut", **given), "--resume"))
    expected, actual = (weights(parts / name / "checkpoint-6") for name in ("whole", "cut"))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    lines = steps(parts / "whole")
    assert [line["loss"] for line in lines] == [line["loss"] for line in steps(parts / "cut")]
    assert all(line["chat_ce/answer_ce/mean"] > 0 for line in lines if line["set/questions/samples"])
    samples = {
        name: sum(line[f"set/{name}/samples"] for line in lines) for name in ("scenes", "questions", "alone")
    }
    assert all(samples.values()) and samples["scenes"] > samples["alone"]
    assert all(line[f"set/{name}/loss"] > 0 for line in lines for name in samples if line[f"set/{name}/samples"])
    rollouts = [line.get("rollout/answers", 0) for line in lines]
    assert [bool(count) for count in rollouts] == [False, True] * 3
    assert max(rollouts) < 6, "half of the six samples of a step are scenes"
    (evaluated,) = (line for line in metrics(parts / "whole") if "eval_accuracy_alone" in line)
    lines = (parts / "whole/evaluations/step-6-alone.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer["question"] for answer in answers] == [line["question"] for line in ALONE]
    assert evaluated["eval_accuracy_alone"] == sum(answer["right"] for answer in answers) / len(answers)
    assert 0 <= evaluated["eval_accuracy_questions"] <= 1 and "eval_f1_50" in evaluated


def test_a_run_of_two_processes_with_rows_without_an_image_ends(parts):
    """Without packing, one question is a row. In some steps, one rank has no image."""
    given = mixed(parts, custom__trainer_variant="stage1_sft") | {
        "training__packing": False,
        "training__per_device_train_batch_size": 1,
        "training__gradient_accumulation_steps": 1,
    }
    given["stage1__pipeline"] = given.pop("rollout_matching__pipeline")
    file = config(parts, "two", **given)
    finish(training(file), processes=2)
    lines = steps(parts / "two")
    assert len(lines) == 6 and sum(line["set/alone/samples"] for line in lines) >= 2
    assert sum(line[f"set/{name}/samples"] for line in lines for name in ("scenes", "questions", "alone")) == 12


def test_the_worked_example_of_the_documentation_trains(parts, tmp_path):
    """The config of docs/training.md, on the data that docs/data.md shows, with a few steps."""
    text = (ROOT / "docs/training.md").read_text()
    section = text[text.index("## Mixing questions in") :]
    tree = yaml.safe_load(section.split("```yaml\n")[1].split("```")[0])
    assert [data["name"] for data in tree["custom"]["train_data"]] == ["scenes", "questions"]
    base = yaml.safe_load(config(parts, "documented").read_text())
    base["custom"] = {"trainer_variant": "stage1_sft"} | tree["custom"]
    base["stage1"] = tree["stage1"]
    base["training"] |= {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    text = yaml.safe_dump(base).replace("scenes/", f"{parts}/data/")
    (tmp_path / "run.yaml").write_text(text)
    finish(training(tmp_path / "run.yaml"))
    lines = metrics(parts / "documented")
    assert any("set/questions/loss" in line for line in lines) and "eval_accuracy_questions" in lines[-2]
