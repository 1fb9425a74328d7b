"""Every family gets coordinate tokens, trains, resumes and merges, on a tiny checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coordexp.config import World, load_settings
from coordexp.config.settings import Adapter
from coordexp.demo.model import Size, make_model
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.families import FAMILIES, load_model
from coordexp.train.learner import learner_weights, with_adapter
from coordexp.train.run import prepare
from tests.command import run
from tests.integration.answers import whole_model
from tests.integration.stage1_runs import config
from tests.rows import Tiny

pytestmark = pytest.mark.timeout(300)

TINY = Size(hidden=64, layers=3, patch=8, vision_hidden=32)
LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def parts(family, tmp_path_factory) -> Path:
    """Return a folder with a tiny model of the family and 12 scenes."""
    folder = tmp_path_factory.mktemp(family)
    write_scenes(folder / "data", SceneSettings(objects=(1, 3)), train=12, val=2, seed=1)
    make_model(folder / "model", "small", family=family, spread=3.0, size=TINY)
    return folder


def assert_equal_weights(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], within: float = 0):
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        assert actual[name].shape == weight.shape, name
        assert (actual[name] - weight).abs().max() <= within, name


def test_coordinate_tokens_are_added_to_a_checkpoint_and_its_logits_stay(family, tmp_path):
    make_model(tmp_path / "plain", "small", family=family, size=TINY, coords=False, tied=False)
    run("model", "add-coords", "--model", tmp_path / "plain", "--out", tmp_path / "coords")
    plain, expanded = (load_model(tmp_path / name, dtype=torch.float32) for name in ("plain", "coords"))
    text = torch.arange(40, 80)[None]
    with torch.no_grad():
        before, after = plain(input_ids=text).logits, expanded(input_ids=text).logits
    used = len(Tiny(tmp_path / "coords").table.pieces) - 1000
    assert torch.equal(before[..., :used], after[..., :used])
    assert after.shape[-1] >= used + 1000


def test_a_run_saves_checkpoints_in_the_layout_of_the_one_that_it_started_from_and_resumes(parts, family):
    file = config(parts, "full", max_steps=2, save_steps=1, lr_scheduler_type="constant")
    prepared = prepare(load_settings(file, World(1)))
    prepared.run()
    last = parts / "full/checkpoint-2"
    saved, base = (load_file(folder / "model.safetensors") for folder in (last, parts / "model"))
    assert {name: weight.shape for name, weight in saved.items()} == {
        name: weight.shape for name, weight in base.items()
    }
    if family == "qwen3_vl_moe":  # the width of the model comes before that of the experts
        assert saved["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 64, 96)
    assert_equal_weights(dict(learner_weights(prepared.trainer.model)), saved)
    loaded = dict(load_model(last).named_parameters())
    assert_equal_weights(loaded, dict(prepared.trainer.model.named_parameters()))
    moved = [name for name in base if not torch.equal(base[name], saved[name])]
    assert len(moved) > 0.9 * len(base)
    last.rename(parts / "removed")
    prepare(load_settings(file, World(1)), parts / "full/checkpoint-1").run()
    assert_equal_weights(load_file(last / "model.safetensors"), saved)


@pytest.mark.parametrize("adapter", [None, LORA], ids=["all weights", "adapter"])
def test_a_frozen_vision_tower_stays_bit_for_bit_and_the_engine_gets_all_weights(parts, adapter):
    name = "frozen-adapter" if adapter else "frozen"
    file = config(parts, name, max_steps=2, save_strategy="no", lr_scheduler_type="constant", adapter=adapter)
    prepared = prepare(load_settings(file, World(1), ["model.freeze=[vision]"]))
    prepared.run()
    sent, base = dict(learner_weights(prepared.trainer.model)), load_file(parts / "model/model.safetensors")
    assert sent.keys() == base.keys()
    moved = {weight for weight in base if not torch.equal(base[weight], sent[weight])}
    tower = {weight for weight in base if "visual." in weight and "merger" not in weight}
    mergers = {weight for weight in base if "merger" in weight}
    assert tower and mergers
    assert not moved & tower
    assert moved & mergers
    assert any("layers.0." in weight for weight in moved)


def test_an_adapter_is_trained_and_merged_into_a_checkpoint_that_answers_as_the_learner_does(parts):
    file = config(parts, "adapter", max_steps=2, save_steps=2, adapter=LORA)
    prepared = prepare(load_settings(file, World(1)))
    prepared.run()
    merged = parts / "merged"
    run("model", "merge", "--adapter", parts / "adapter/checkpoint-2", "--out", merged)
    saved, base = load_file(merged / "model.safetensors"), load_file(parts / "model/model.safetensors")
    assert saved.keys() == base.keys()
    assert_equal_weights(saved, dict(learner_weights(prepared.trainer.model)), within=1e-6)
    adapted = {name for name in saved if not torch.equal(saved[name], base[name])}
    assert any("self_attn" in name for name in adapted) and any("visual" in name for name in adapted)
    row = Tiny(merged).collate([Tiny(merged).example(1)])
    learner = prepared.trainer.model.eval()
    with torch.no_grad():
        expected = learner(**row.inputs).logits
        assert (load_model(merged)(**row.inputs).logits - expected).abs().max() <= 1e-4


def test_all_linear_reaches_attention_and_mlps_but_no_experts(parts, family):
    model = with_adapter(whole_model(parts / "model"), Adapter(**LORA, train_coord_rows=False), 0)
    adapted = [name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name]
    kinds = {".".join(name.split(".")[-2:]) for name in adapted if "language_model" in name}
    expected = {f"self_attn.{name}_proj" for name in "qkvo"}
    if family != "qwen3_vl_moe":
        expected |= {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    if family == "qwen3_5":
        expected |= {f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")} | {"linear_attn.out_proj"}
    assert kinds == expected
