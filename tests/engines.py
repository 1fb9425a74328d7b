"""Small drawn images, and a real vLLM engine to answer them."""

from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from transformers import AutoProcessor

from coordexp.answers.table import VocabularyTable
from coordexp.config.settings import Custom
from coordexp.rollout.generate import VllmBackend
from coordexp.rollout.prompt import PromptBuilder
from coordexp.rollout.start import stop_engine

QUESTION: str = Custom.model_fields["prompt"].default


def prompt(processor: Any) -> str:
    """Return the conversation as the model's own chat template renders it."""
    return PromptBuilder(processor, QUESTION).text()


def drawing(seed: int = 0, side: int = 128) -> Image.Image:
    """Return an image of two shapes on a pale ground, different for each seed."""
    image = Image.new("RGB", (side, side), (235, 240, 245))
    draw = ImageDraw.Draw(image)
    offset = 13 * seed % (side // 2)
    draw.rectangle((offset + 8, 20, offset + 44, 60), fill=(200, 40 + 30 * seed % 200, 40))
    draw.ellipse((side - offset - 60, 70, side - offset - 20, 110), fill=(40, 80, 60 + 50 * seed % 190))
    return image


def start_vllm(folder: Path) -> Any:
    """Start an engine in float32 as `coordexp predict` does."""
    table = VocabularyTable.from_folder(folder)
    prompts = PromptBuilder(AutoProcessor.from_pretrained(folder), QUESTION)
    return VllmBackend(folder, prompts, table, max_length=1024).engine


def stop_vllm(engine: Any) -> None:
    stop_engine(engine)
