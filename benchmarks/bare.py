"""The bare engine with which served and colocated rollouts are compared. It gets the same requests, with the
images in memory."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.answers.table import VocabularyTable
from coordexp.data import RecordFile
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.rollout.backend import ImageRef, Rollout
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder, open_image


def draw_images(folder: Path, count: int) -> list[ImageRef]:
    """Write crowded scenes to `folder`, and return their images."""
    scenes = SceneSettings(objects=(3, 8), side=128)
    write_scenes(folder, scenes, train=64, val=count, seed=9)
    records = RecordFile(folder / "val.jsonl")
    return [ImageRef.of(records, records[k]) for k in range(count)]


def start_bare_engine(folder: Path, most: int, length: int, share: float) -> Any:
    """Start `vllm.LLM` for at most `most` sequences of `length` tokens at once, with this share of the memory."""
    os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    return LLM(
        str(folder),
        dtype="float32",
        gpu_memory_utilization=share,
        max_model_len=length,
        max_num_seqs=most,
        enforce_eager=True,
        limit_mm_per_prompt={"image": 1, "video": 0},
        use_tqdm_on_load=False,
    )


class BenchmarkLearner:
    """The parts of a learner that rollouts need: its model, its prompts, and a backend that generates with
    the model itself."""

    def __init__(self, folder: Path) -> None:
        self.prompts = PromptBuilder(AutoProcessor.from_pretrained(folder), "Detect all objects.")
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.table = VocabularyTable.from_folder(folder)
        self.own = HuggingFaceBackend(lambda: self.model, self.prompts, self.table, 16)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter([(name, weight.detach()) for name, weight in self.model.named_parameters()])


class BareGeneration:
    """Greedy generation with `LLM.generate`, which counts the tokens of the last call."""

    def __init__(
        self, engine: Any, prompts: PromptBuilder, end: int, images: Sequence[ImageRef], most: int
    ) -> None:
        from vllm import SamplingParams

        self.engine = engine
        self.sampling = SamplingParams(
            temperature=0.0, max_tokens=most, logprobs=0, stop_token_ids=[end], ignore_eos=True, detokenize=False
        )
        self.requests = [
            {"prompt": prompts.text(), "multi_modal_data": {"image": open_image(image.path, image.size)}}
            for image in images
        ]
        self.tokens = 0

    def generate(self) -> None:
        outputs = self.engine.generate(self.requests, self.sampling, use_tqdm=False)
        self.tokens = sum(len(output.outputs[0].token_ids) for output in outputs)

    def reset_caches(self) -> None:
        for name in ("prefix", "mm", "encoder"):
            getattr(self.engine.llm_engine, f"reset_{name}_cache")()


def count_tokens(rollouts: Sequence[Rollout]) -> int:
    """Return the number of tokens, including those that ended an answer."""
    return sum(len(rollout.ids) + (rollout.finish_reason == "stop") for rollout in rollouts)
