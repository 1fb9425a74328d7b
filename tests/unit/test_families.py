"""A checkpoint is loaded whole, or it is an error."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from coordexp.errors import UserError
from coordexp.families import load_model
from tests.integration.stage2_runs import MODEL

pytestmark = pytest.mark.timeout(120)
WEIGHT = "model.language_model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "model")


def change_weights(folder, change):
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def test_a_complete_checkpoint_is_loaded(folder):
    assert type(load_model(folder)).__name__ == "Qwen3VLForConditionalGeneration"


def test_a_missing_weight_is_named(folder):
    change_weights(folder, lambda weights: weights.pop(WEIGHT))
    with pytest.raises(UserError, match=f"the weight {WEIGHT} is missing\n"):
        load_model(folder)


def test_weights_of_another_model_are_named(folder):
    def add(weights):
        for name in ("other", "more"):
            weights[f"model.language_model.layers.9.{name}"] = weights[WEIGHT].clone()

    change_weights(folder, add)
    expected = "layers.9.more is not a weight of this model, and 1 more"
    with pytest.raises(UserError, match=expected):
        load_model(folder)


def test_a_model_of_another_family_is_not_loaded(folder):
    settings = json.loads((folder / "config.json").read_text()) | {"model_type": "llava"}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"model_type is 'llava', .*\n.*qwen3_vl"):
        load_model(folder)
