"""`coordexp data doctor --config`: the lengths of whole examples are those that training makes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from coordexp.answers.formats import load_format
from coordexp.config import RolloutMatching, load_settings
from coordexp.data import Questions, RecordFile, read_records
from coordexp.demo.model import Size, make_model
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.rollout.lengths import ExampleCounter
from coordexp.rollout.prompt import PromptBuilder, load_processor
from coordexp.train.encode import TrainingSet
from tests.command import run

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    make_model(folder / "model", "small", size=Size(hidden=64, layers=2, patch=8, vision_hidden=32))
    write_scenes(folder / "data", SceneSettings(), train=6, val=1, seed=0, questions=1)
    records = [record for _, record in read_records(folder / "data/train.jsonl")]
    asking = [
        replace(records[1], classes=("red circle", "blue square")),
        replace(records[2], expression="the largest shape"),
        replace(records[3], prompt="What is there?"),
    ]
    text = {"question": "What is the capital of France?", "answer": "Paris"}
    lines = [record.as_json() for record in (*records, *asking)] + [json.dumps(text)]
    lines += (folder / "data/train.questions.jsonl").read_text().splitlines()
    (folder / "data/mixed.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_config(folder, **custom):
    tree = {
        "extends": "stage1.yaml",
        "model": {"path": str(folder / "model")},
        "custom": {"train_jsonl": str(folder / "data/mixed.jsonl"), "val_jsonl": None} | custom,
        "training": {"output_dir": str(folder / "run"), "eval_strategy": "no"},
    }
    for name in ("stage1.yaml", "base.yaml"):
        (folder / name).write_text((CONFIGS / name).read_text())
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


@pytest.mark.parametrize(
    "custom", [{}, {"object_field_order": "geometry_first", "prompt": "Find all shapes, however small they are."}]
)
def test_counted_lengths_are_those_of_training(folder, custom):
    settings = load_settings(write_config(folder, **custom)).settings
    questions = Questions.of(settings.custom)
    prompts = PromptBuilder(load_processor(folder / "model"), questions.of_run)
    answers = load_format(folder / "model", order=settings.custom.object_field_order)
    records = RecordFile(folder / "data/mixed.jsonl")
    training_set = TrainingSet(records, prompts, answers, RolloutMatching(), settings.custom, trains_chat=True)
    count = ExampleCounter(answers, prompts, questions)
    counted = [sum(count(records.read(k))) for k in range(len(records))]
    assert counted == [training_set.measure_truth(k) for k in range(len(records))]


def test_the_doctor_compares_examples_with_the_length_of_the_config(folder):
    file, config = folder / "data/mixed.jsonl", write_config(folder)
    words = ["data", "doctor", file, "--config", config, "--json"]
    examples = json.loads(run(*words).stdout)["details"]["example_tokens"]
    assert examples["records"] == len(RecordFile(file))
    limit = examples["longest"] - 1
    result = run(*words[:-1], "--set", f"global_max_length={limit}", code=1)
    assert "too-long" in result.output and f"; at most {limit:,} are allowed" in result.output
    assert f"longest {limit + 1:,}; global_max_length is {limit:,}" in result.output


def test_an_option_without_effect_is_refused(folder):
    assert "has no effect" in run("data", "doctor", folder / "data/mixed.jsonl", "--set", "a=1", code=1).output
