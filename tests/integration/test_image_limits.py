"""With `model.max_pixels`, learner, engines and saved checkpoints scale a larger image down in the same way."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coordexp.answers.table import VocabularyTable
from coordexp.config import RolloutMatching
from coordexp.demo.model import Size, make_model
from coordexp.rollout.backend import ImageRef
from coordexp.rollout.prompt import load_processor, read_image_size
from coordexp.rollout.start import EngineSetup, engine_arguments
from tests.engines import drawing
from tests.integration.colocation import Colocation, ids
from tests.integration.stage2_runs import MODEL

pytestmark = pytest.mark.timeout(480)
LIMIT = 64 * 64
LIMITS = {"longest_edge": LIMIT}


def draw_large(folder: Path) -> list[ImageRef]:
    """Draw images of up to 16 times the limit, and one below it."""
    images = []
    for k, side in enumerate((128, 128, 256, 48)):
        path = folder / f"large-{k}.png"
        drawing(k, 128).resize((side, side)).save(path)
        images.append(ImageRef(str(path), side, side))
    return images


@pytest.mark.engine
def test_a_colocated_engine_scales_images_down_and_answers_as_the_learner_does(tmp_path):
    folder = make_model(tmp_path / "model", "small", spread=6.0, size=Size(patch=8))
    colocation = Colocation(folder, draw_large(tmp_path), image_limits=LIMITS)
    try:
        with colocation.backend.session():
            colocation.sync(0)
            answers = colocation.backend.generate(colocation.requests(24))
    finally:
        colocation.backend.close()
    own = colocation.learner.generate(colocation.requests(24))
    assert [answer.prompt_ids for answer in answers] == [answer.prompt_ids for answer in own]
    assert ids(answers) == ids(own)
    counts = [answer.prompt_ids.count(colocation.prompts.image_token) for answer in answers]
    assert counts == [16, 16, 16, 9]  # the first two would have 64 tokens without the limit
    assert len(set(ids(own))) == 4


def processor_of_vllm(folder: Path, image_limits: dict[str, int]) -> Any:
    """Return vLLM's own processor of a model folder, with the arguments that an engine gets."""
    from vllm import AsyncEngineArgs
    from vllm.multimodal import MULTIMODAL_REGISTRY

    processor, table = load_processor(folder, image_limits), VocabularyTable.from_folder(folder)
    setup = EngineSetup(folder, "float32", RolloutMatching(), table, torch.device("cpu"))
    setup = replace(setup, image_size=read_image_size(processor), has_image_limits=bool(image_limits))
    return MULTIMODAL_REGISTRY.create_processor(AsyncEngineArgs(**engine_arguments(setup)).create_model_config())


@pytest.mark.engine
def test_the_memory_that_an_engine_reserves_for_an_image_follows_the_limit(tmp_path):
    """vLLM sizes the profile of its vision encoder and the encoder cache by the largest image."""
    assert processor_of_vllm(MODEL, {}).info.get_max_image_tokens() == 4096
    assert processor_of_vllm(MODEL, LIMITS).info.get_max_image_tokens() == 16
