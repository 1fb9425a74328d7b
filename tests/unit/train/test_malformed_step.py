"""A whole training step of a real, tiny model on malformed answers. Only the answers are scripted."""

import json
import math
from collections.abc import Iterator

import pytest
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.answers.table import VocabularyTable
from coordexp.data import TrueObject
from coordexp.demo.model import Size, make_model
from coordexp.rollout.prompt import PromptBuilder
from coordexp.train import run
from tests.scripted import Said, ScriptedBackend, write_training_set
from tests.unit.answers.conftest import answer, box, entry
from tests.unit.config.trees import load, stage2

CUP = TrueObject("cup", box(10, 10, 110, 110))
DOG = TrueObject("dog", box(300, 300, 500, 500))
CAT = TrueObject("cat", box(600, 600, 900, 900))
TRUTH = dict.fromkeys(("broken.png", "schema.png", "empty.png", "cut.png"), (CUP, DOG, CAT))
ENTRIES = [entry(f"object_{k}", true.desc, true.geometry) for k, true in enumerate((CUP, DOG, CAT), start=1)]
SCRIPT = {
    # A syntax break in the second object: it is cut off, and the third one with it.
    "broken.png": Said(answer(ENTRIES[0], '"object_2": {"desc": "dog", "bbox_2d": [[}', ENTRIES[2])),
    # Sound JSON, and three coordinates in the second object: its neighbours stay valid.
    "schema.png": Said(answer(ENTRIES[0], ENTRIES[1].replace(', "<|coord_500|>"]', "]"), ENTRIES[2])),
    "empty.png": Said(""),
    # The second object is not finished.
    "cut.png": Said("{" + ENTRIES[0] + ", " + ENTRIES[1][:-20], "length"),
}
COUNTED = {
    "rollout/answers": 4,
    "parse/objects": 3 + 3 + 0 + 2,
    "parse/valid": 1 + 2 + 0 + 1,
    "parse/invalid": 2 + 1 + 0 + 1,
    "match/missed": 2 + 1 + 3 + 2,
}
# The third object of the broken answer is not read.
REASONS = {"syntax": 1, "unread": 1, "wrong_count": 1, "truncated": 1}


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return the list that gets the row length of every forward pass of the model."""
    lengths: list[int] = []
    plain = Qwen3VLForConditionalGeneration.forward

    def watched(self, *given, **inputs):
        lengths.append(inputs["input_ids"].shape[1])
        return plain(self, *given, **inputs)

    monkeypatch.setattr(Qwen3VLForConditionalGeneration, "forward", watched)
    return lengths


@pytest.mark.slow
@pytest.mark.scenario("R19.S1", "R25.S1", "R25.S2", "R31.S1", on="model")
def test_a_step_on_malformed_answers_completes_in_one_forward_pass_changes_the_weights_and_counts_them(
    tmp_path, monkeypatch, forwards
):
    model = make_model(
        tmp_path / "model", "small", size=Size(hidden=64, layers=1, vision_hidden=32, vision_depth=1)
    )
    table = VocabularyTable.from_folder(model)
    write_training_set(tmp_path, TRUTH, table)
    for name in TRUTH:
        Image.new("RGB", (64, 48), "white").save(tmp_path / name)
    loaded = load(
        stage2(
            model={"path": str(model), "dtype": "float32"},
            custom__train_jsonl=str(tmp_path / "train.jsonl"),
            rollout_matching__rollout_backend="hf",
            training={
                "output_dir": str(tmp_path / "run"),
                "use_cpu": True,
                "max_steps": 1,
                "save_steps": 1,
                "logging_steps": 1,
                "learning_rate": 1e-3,
                "per_device_train_batch_size": 4,
                "report_to": "none",
            },
        )
    )
    prompts = PromptBuilder(AutoProcessor.from_pretrained(model), loaded.settings.custom.prompt)
    backend = ScriptedBackend(SCRIPT, table, prompt_ids=tuple(prompts.ids(64, 48)))
    monkeypatch.setattr(run.Assembly, "backend", backend)
    monkeypatch.setattr(run.StopOnSignal, "listen", lambda _: None)  # leaves the signals of this process alone
    assert run.prepare(loaded).run().steps == 1
    assert [len(call) for call in backend.calls] == [4]
    assert len(forwards) == 1, "one pass over one row that has every sample once"
    line = next(
        values
        for values in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        if "loss" in values
    )
    assert forwards == [line["tokens"]]
    assert {name: line[name] for name in COUNTED} == COUNTED
    counted = {name.rpartition("/")[2]: value for name, value in line.items() if name.startswith("parse/invalid/")}
    assert {name: value for name, value in counted.items() if value} == REASONS
    assert line["loss"] > 0 and math.isfinite(line["loss"])
    assert line["grad_norm"] > 0 and math.isfinite(line["grad_norm"])
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run/checkpoint-1"))
    changed = {name for name, weight in before.items() if not weight.equal(after[name])}
    assert len(changed) > len(before) / 2
