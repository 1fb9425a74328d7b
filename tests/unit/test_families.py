"""A checkpoint is loaded whole, or it is an error."""

import json
import os
import pickle
import shutil

import pytest
from safetensors.torch import load_file, save_file

from coordexp.errors import UserError
from coordexp.families import load_model
from coordexp.rollout.prompt import PromptBuilder, load_processor
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


def cut(file):
    file.write_bytes(file.read_bytes()[:-1000])


def write_long_header(file):
    file.write_bytes((1 << 62).to_bytes(8, "little") + file.read_bytes()[8:])


def nest(file):
    file.write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", cut),
        ("model.safetensors", write_long_header),
        ("model.safetensors", lambda file: file.write_bytes(b"")),
        ("config.json", nest),
        ("generation_config.json", nest),
        ("model.safetensors.index.json", nest),
    ],
)
def test_a_damaged_file_is_named_with_a_way_out(folder, name, damage):
    damage(folder / name)
    for load in (load_model, load_processor):
        with pytest.raises(UserError) as raised:
            load(folder)
        assert raised.value.problem.startswith(f"{folder / name} cannot be read")
        assert "download it again" in raised.value.fix


@pytest.mark.parametrize("name", ["processor_config.json", "tokenizer_config.json"])
def test_a_damaged_file_of_the_processor_is_named(folder, name):
    nest(folder / name)
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        load_processor(folder)


def test_weights_in_a_pickle_are_not_read(folder, tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(UserError, match=r"has no \*.safetensors file"):
        load_model(folder)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{% for", "{{ a.b.c }}", "{{ raise_exception('no') }}"]
)
def test_a_chat_template_that_cannot_be_used_is_an_error_that_the_user_can_mend(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match="the chat template of the model cannot be used"):
        PromptBuilder(load_processor(folder), "Detect.")
