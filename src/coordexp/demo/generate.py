"""Greedy answers to one image, by transformers and by vLLM: the first sign of life of an environment."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.config.settings import Custom
from coordexp.rollout.prompt import PromptBuilder

QUESTION: str = Custom.model_fields["prompt"].default


@dataclass(frozen=True)
class Answer:
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    text: str


def prompt(processor: Any) -> str:
    """The conversation as the model's own chat template renders it."""
    return PromptBuilder(processor, QUESTION).text


def drawing(seed: int = 0, side: int = 128) -> Image.Image:
    """Two shapes on a pale ground, different for each seed."""
    image = Image.new("RGB", (side, side), (235, 240, 245))
    draw = ImageDraw.Draw(image)
    offset = 13 * seed % (side // 2)
    draw.rectangle((offset + 8, 20, offset + 44, 60), fill=(200, 40 + 30 * seed % 200, 40))
    draw.ellipse((side - offset - 60, 70, side - offset - 20, 110), fill=(40, 80, 60 + 50 * seed % 190))
    return image


def with_transformers(folder: Path, images: Sequence[Image.Image], new_tokens: int) -> list[Answer]:
    processor = AutoProcessor.from_pretrained(folder)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for image in images:
        inputs = processor(text=[prompt(processor)], images=[image], return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0].tolist()
        start = inputs["input_ids"].shape[1]
        answers.append(_answer(processor, inputs["input_ids"][0].tolist(), ids[start:]))
    return answers


def with_vllm(engine: Any, folder: Path, images: Sequence[Image.Image], new_tokens: int) -> list[Answer]:
    from vllm import SamplingParams

    processor = AutoProcessor.from_pretrained(folder)
    requests = [{"prompt": prompt(processor), "multi_modal_data": {"image": image}} for image in images]
    greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens)
    outputs = engine.generate(requests, greedy, use_tqdm=False)
    return [_answer(processor, output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


def start_vllm(folder: Path, *, max_model_len: int = 1024, **settings: Any) -> Any:
    """A vLLM engine in float32 with settings that suit a tiny model; on a CPU it takes about a minute."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the engine's own processes
    from vllm import LLM

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.2,
        "seed": 0,
    }
    return LLM(str(folder), max_model_len=max_model_len, **(defaults | settings))


def stop_vllm(engine: Any) -> None:
    """Ends the engine's processes; without this they are killed when the interpreter exits."""
    engine.llm_engine.engine_core.shutdown()


def _answer(processor: Any, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Answer:
    text = processor.tokenizer.decode(list(answer_ids), skip_special_tokens=False)
    return Answer(tuple(prompt_ids), tuple(answer_ids), text)
