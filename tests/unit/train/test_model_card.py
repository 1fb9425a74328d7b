"""A merged checkpoint has a model card that the hub can read, and that names no folder of this machine."""

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from coordexp.cli import app
from coordexp.train.model_card import find_hub_name, make_card, write_card
from tests.integration.test_detector import MODEL, make_adapter

HISTORY = [
    {"step": 100, "eval_f1": 0.25, "eval_runtime": 3.0},
    {"step": 150, "loss": 1.0},
    {"step": 200, "eval_f1": 0.512345, "eval_runtime": 3.0},
]


@pytest.fixture
def adapter(tmp_path):
    """Return a checkpoint with what the card reads, in the folder of its run."""
    folder = tmp_path / "runs/lora/checkpoint-200"
    folder.mkdir(parents=True)
    config = {"base_model_name_or_path": "somewhere/else", "r": 32, "lora_alpha": 64, "use_dora": True}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1200, "log_history": HISTORY}))
    (folder / "coordexp.json").write_text('{"prompt": "Detect all objects."}')
    settings = {
        "model": {"path": "/home/somebody/model"},
        "custom": {"trainer_variant": "stage1", "train_jsonl": "/home/somebody/train.jsonl"},
        "training": {"learning_rate": 1e-5, "output_dir": "/home/somebody/runs"},
    }
    (folder.parent / "resolved.yaml").write_text(yaml.safe_dump(settings))
    return folder


def test_the_hub_reads_the_card_with_the_base_model_and_the_latest_evaluation(adapter):
    card = ModelCard(make_card("Qwen/Qwen3-VL-4B-Instruct", adapter))
    assert card.data.base_model == "Qwen/Qwen3-VL-4B-Instruct"
    assert card.data.library_name == "transformers"
    for words in ("1,200 steps", "| `eval_f1` | 0.5123 |", "| `step` | 200 |", "| `adapter: rank` | 32 |"):
        assert words in card.text
    assert "| `training.learning_rate` | 1e-05 |" in card.text and "Detect all objects." in card.text
    assert "eval_runtime" not in card.text


def test_the_card_names_no_folder_of_this_machine(adapter):
    text = make_card("/home/somebody/checkpoints/my-model", adapter)
    assert "somebody" not in text and str(adapter.parent) not in text
    assert "`my-model`" in text
    assert ModelCard(text).data.base_model is None


def test_a_base_model_in_the_cache_of_the_hub_has_its_name_on_the_hub():
    assert (
        find_hub_name("/cache/hub/models--Qwen--Qwen3-VL-4B-Instruct/snapshots/abc") == "Qwen/Qwen3-VL-4B-Instruct"
    )
    assert find_hub_name("runs/stage1/checkpoint-400") is None


def test_a_folder_that_exists_is_not_taken_for_a_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_hub_name("runs/model") == "runs/model"
    Path("runs/model").mkdir(parents=True)
    assert find_hub_name("runs/model") is None


def test_an_adapter_of_another_program_has_a_card_too(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    assert "Nothing was measured" in ModelCard(make_card("a/b", tmp_path)).text


def test_a_card_that_is_there_is_kept(adapter, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    assert not write_card(tmp_path, "a/b", adapter)
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.timeout(240)
def test_merging_writes_the_card(tmp_path):
    adapter = make_adapter(tmp_path / "checkpoint-3")
    result = CliRunner().invoke(
        app, ["model", "merge", "--adapter", str(adapter), "--out", str(tmp_path / "merged")]
    )
    assert result.exit_code == 0, result.output
    card = ModelCard.load(tmp_path / "merged/README.md")
    assert card.data.tags == ["coordexp", "object-detection"]
    assert str(MODEL.parent) not in card.content and "| `adapter: rank` | 4 |" in card.text
