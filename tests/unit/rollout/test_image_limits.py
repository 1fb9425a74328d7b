"""Limits on the pixels of an image (`model.max_pixels`, `model.min_pixels`): the number of its tokens, its
patches, and what is saved with a model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from coordexp.answers.table import VocabularyTable
from coordexp.config import RolloutMatching
from coordexp.errors import EngineError, UserError
from coordexp.rollout.prompt import PromptBuilder, load_processor, read_image_size
from coordexp.rollout.start import EngineSetup
from coordexp.servers.app import _describe
from coordexp.servers.links import check_server
from tests.integration.stage2_runs import MODEL
from tests.unit.config.trees import load, only_problem, stage2

LIMIT = 64 * 64  # pixels; an image token of this model is 16 x 16


def limits(**pixels: int) -> dict[str, int]:
    return load(stage2(**{f"model__{name}": value for name, value in pixels.items()})).settings.model.image_limits


def image_token_count(prompts: PromptBuilder, width: int, height: int) -> int:
    return prompts.ids(width, height).count(prompts.image_token)


@pytest.mark.parametrize(("width", "height"), [(128, 128), (256, 64), (80, 400), (64, 64), (48, 32)])
def test_a_larger_image_is_scaled_down_to_the_limit_and_has_as_many_patches_as_tokens(tmp_path, width, height):
    prompts = PromptBuilder(load_processor(MODEL, limits(max_pixels=LIMIT)), "Detect all objects.")
    usual = PromptBuilder(load_processor(MODEL), "Detect all objects.")
    Image.new("RGB", (width, height)).save(tmp_path / "image.png")
    _, grid = prompts.pixels(tmp_path / "image.png", (width, height))
    tokens = image_token_count(prompts, width, height)
    assert int(grid.prod()) == 4 * tokens
    assert tokens * 16 * 16 <= LIMIT
    assert (tokens < image_token_count(usual, width, height)) == (width * height > LIMIT)


def test_a_smaller_image_is_scaled_up_to_the_limit():
    prompts = PromptBuilder(load_processor(MODEL, limits(min_pixels=LIMIT)), "Detect all objects.")
    assert image_token_count(prompts, 32, 32) == LIMIT // 16**2
    assert image_token_count(PromptBuilder(load_processor(MODEL), "Detect all objects."), 32, 32) == 4


def test_a_saved_processor_has_the_limits(tmp_path):
    load_processor(MODEL, limits(max_pixels=LIMIT, min_pixels=512)).save_pretrained(tmp_path)
    assert read_image_size(AutoProcessor.from_pretrained(tmp_path)) == {
        "shortest_edge": 512,
        "longest_edge": LIMIT,
    }


def test_without_limits_the_processor_is_that_of_the_checkpoint(tmp_path):
    assert limits() == {}
    load_processor(MODEL, limits()).save_pretrained(tmp_path / "ours")
    AutoProcessor.from_pretrained(MODEL).save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        json.loads((tmp_path / name / "processor_config.json").read_text()) for name in ("ours", "theirs")
    )
    assert ours == theirs


def test_a_learner_refuses_a_server_whose_limits_in_force_are_others(tmp_path):
    """Limits may come from the settings or from the model folder."""
    load_processor(MODEL, limits(max_pixels=LIMIT)).save_pretrained(tmp_path)
    shutil.copy(MODEL / "config.json", tmp_path)

    def setup(folder: Path, image_limits: dict[str, int]) -> EngineSetup:
        size = read_image_size(load_processor(folder, image_limits))
        device, table = torch.device("cpu"), VocabularyTable.from_folder(MODEL)
        return EngineSetup(folder, "float32", RolloutMatching(), table, device, image_size=size)

    limited, usual = setup(MODEL, limits(max_pixels=LIMIT)), setup(MODEL, {})
    check_server("server 0", _describe(limited, 512), limited, [])
    check_server("server 0", _describe(setup(tmp_path, {}), 512), limited, [])
    for server, learner in ((limited, usual), (usual, limited)):
        with pytest.raises(EngineError, match=r"image_size.longest_edge is \d+ there and \d+ here") as error:
            check_server("server 0", _describe(server, 512), learner, [])
        assert "model.path, max_pixels and min_pixels" in error.value.fix


def test_a_lower_limit_above_the_upper_one_is_refused():
    tree = stage2(model__min_pixels=5000, model__max_pixels=4096)
    path, problem = only_problem(tree)
    assert path == "model.min_pixels" and "5000 is more than model.max_pixels 4096" in problem


@pytest.mark.parametrize(
    ("pixels", "problem"),
    [
        ({"max_pixels": 100}, "model.max_pixels 100 is less than the 256 pixels of one image token"),
        ({"min_pixels": 2**21}, "model.max_pixels 1048576 is less than model.min_pixels 2097152"),
    ],
)
def test_limits_that_do_not_fit_the_checkpoint_are_refused(pixels, problem):
    with pytest.raises(UserError, match=problem):
        load_processor(MODEL, limits(**pixels))
