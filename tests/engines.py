"""Small drawn images, and the answers of transformers and of a real vLLM engine to them, without our backends."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import AutoProcessor

from coordexp.answers.table import VocabularyTable
from coordexp.config.settings import Custom
from coordexp.families import load_model
from coordexp.rollout.generate import VllmBackend
from coordexp.rollout.prompt import PromptBuilder
from coordexp.rollout.start import stop_engine

QUESTION: str = Custom.model_fields["prompt"].default


@dataclass(frozen=True)
class PlainAnswer:
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


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


def with_transformers(folder: Path, images: Sequence[Image.Image], new_tokens: int) -> list[PlainAnswer]:
    """Return greedy answers of transformers, one image at a time."""
    processor = AutoProcessor.from_pretrained(folder)
    model = load_model(folder, dtype=torch.float32).eval()
    answers = []
    for image in images:
        inputs = processor(text=[prompt(processor)], images=[image], return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0].tolist()
        start = inputs["input_ids"].shape[1]
        answers.append(PlainAnswer(tuple(inputs["input_ids"][0].tolist()), tuple(ids[start:])))
    return answers


def with_vllm(engine: Any, folder: Path, images: Sequence[Image.Image], new_tokens: int) -> list[PlainAnswer]:
    """Return greedy answers of a vLLM engine to all images at once."""
    from vllm import SamplingParams

    processor = AutoProcessor.from_pretrained(folder)
    inputs = [{"prompt": prompt(processor), "multi_modal_data": {"image": image}} for image in images]
    greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens)
    outputs = engine.generate(inputs, greedy, use_tqdm=False)
    return [PlainAnswer(tuple(output.prompt_token_ids), tuple(output.outputs[0].token_ids)) for output in outputs]


def start_vllm(folder: Path) -> Any:
    """Start an engine in float32 as `coordexp predict` does."""
    table = VocabularyTable.from_folder(folder)
    prompts = PromptBuilder(AutoProcessor.from_pretrained(folder), QUESTION)
    return VllmBackend(folder, prompts, table, max_length=1024).engine


def stop_vllm(engine: Any) -> None:
    stop_engine(engine)
