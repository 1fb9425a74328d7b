"""Random checkpoints in the shape of published models, written shard by shard."""

import json
from types import SimpleNamespace

import pytest
import torch
from published import write_published
from transformers import AutoProcessor

from coordexp.answers.table import VocabularyTable
from coordexp.errors import UserError
from coordexp.families import load_model
from coordexp.shapes import (
    ModelShape,
    TextShape,
    VisionShape,
    count_parameters,
    expected_weights,
    read_shape,
    read_weights,
)

pytestmark = pytest.mark.slow

SHAPE = ModelShape(
    TextShape(16, 2, 4, 2, 24, 32, 151_936), VisionShape(16, 2, 2, 32, (0,), positions=64), tied=True
)
LARGEST = 20_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_published(tmp_path_factory.mktemp("published") / "model", SHAPE, largest_shard=LARGEST)


def test_the_checkpoint_loads_completely_in_16_bits(checkpoint):
    model = load_model(checkpoint, dtype="auto")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    layer = model.model.language_model.layers[1]
    assert layer.mlp.gate_proj.weight.float().std().item() == pytest.approx(0.02, rel=0.15)
    assert layer.input_layernorm.weight.unique().tolist() == [1.0]
    assert model.model.visual.blocks[0].attn.qkv.bias.unique().tolist() == [0.0]


def test_the_checkpoint_has_the_shape_and_the_tokenizer_with_coordinates(checkpoint):
    shape = SHAPE.with_coordinate_tokens()
    assert read_shape(checkpoint) == shape
    assert read_weights(checkpoint) == expected_weights(shape)
    table = VocabularyTable.from_folder(checkpoint)
    assert table.first_coord + 1000 == 152_669 <= shape.text.vocabulary
    processor = AutoProcessor.from_pretrained(checkpoint)
    assert processor.image_processor.size["longest_edge"] == 16_777_216


def test_every_shard_is_listed_in_the_index(checkpoint):
    files = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert len({path.stat().st_mode for path in checkpoint.iterdir()}) == 1
    assert index["metadata"]["total_size"] == 2 * count_parameters(
        expected_weights(SHAPE.with_coordinate_tokens())
    )


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="GB"):
        write_published(tmp_path / "model", SHAPE)
    assert list((tmp_path / "model").iterdir()) == []
