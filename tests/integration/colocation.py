"""A colocated engine and the learner that it serves. Tests replace the learner, because an engine is slow to
start."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coordexp.answers.table import VocabularyTable
from coordexp.config import RolloutMatching
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout
from coordexp.rollout.colocate import ColocateBackend
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder, load_processor, read_image_size
from coordexp.rollout.start import EngineSetup
from coordexp.train.learner import learner_adapter, learner_weights
from tests.integration.answers import whole_model

SIDES = (192, 160, 96, 64)
SETTINGS = RolloutMatching.model_validate(
    {
        "decode_batch_size": 16,
        "vllm": {
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.1,
            "max_model_len": 512,
            "enforce_eager": True,
        },
    }
)


def draw_images(folder: Path) -> list[ImageRef]:
    """Draw 16 images of four sizes, which take turns."""
    for side in SIDES:
        write_scenes(folder / str(side), SceneSettings(side=side), train=1, val=4, seed=side)
    return [
        ImageRef(str(folder / f"{side}/images/val/{k:07d}.png"), side, side) for k in range(4) for side in SIDES
    ]


def with_adapter_sync(settings: RolloutMatching, rank: int) -> RolloutMatching:
    """Return the settings of a run whose engine takes adapters up to this rank."""
    sync = settings.vllm.sync.model_copy(update={"mode": "adapter"})
    vllm = settings.vllm.model_copy(update={"enable_lora": True, "max_lora_rank": rank, "sync": sync})
    return settings.model_copy(update={"vllm": vllm})


class Colocation:
    """A learner with a colocated backend. `messages` are those to the user, and `recorded` the facts for the run's
    manifest. `image_limits` replace the limits on the pixels of an image that the model folder has."""

    def __init__(
        self,
        folder: Path,
        images: Sequence[ImageRef],
        settings: RolloutMatching = SETTINGS,
        image_limits: Mapping[str, int] | None = None,
    ) -> None:
        self.folder, self.images = folder, images
        self.messages: list[str] = []
        self.recorded: list[dict[str, Any]] = []
        self.prompts = PromptBuilder(load_processor(folder, image_limits), "Detect all objects.")
        self.table = VocabularyTable.from_folder(folder)
        self.model: Any = whole_model(folder)
        self.room: Callable[[], AbstractContextManager[None]] = nullcontext
        self.learner = HuggingFaceBackend(lambda: self.model, self.prompts, self.table, 16)
        self.backend = ColocateBackend(
            EngineSetup(
                folder,
                "float32",
                settings,
                self.table,
                torch.device("cpu"),
                image_size=read_image_size(self.prompts.processor),
                has_image_limits=bool(image_limits),
            ),
            self.prompts,
            self.learner,
            images[:4],
            room=lambda: self.room(),
            notify=self.messages.append,
            adapter=lambda: learner_adapter(self.model),
            record=self.recorded.append,
        )
        self.version = 0

    @property
    def tied(self) -> bool:
        return bool(self.model.config.tie_word_embeddings)

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""
        assert self.backend._updates is not None
        return self.backend._updates.runner

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return learner_weights(self.model)

    def sync(self, version: int | None = None) -> None:
        """Send the learner's weights, inside a session of the backend."""
        self.version = self.version + 1 if version is None else version
        self.backend.sync(self.weights, self.version)
        self.learner.sync(self.weights, self.version)

    def sync_and_compare(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Send the weights, and check that the engine answers as the learner does. Return the answers."""
        with self.backend.session():
            self.sync()
            answers = self.backend.generate(requests)
        own = self.learner.generate(requests)
        assert ids(answers) == ids(own)
        for answer, expected in zip(answers, own, strict=True):
            assert answer.prompt_ids == expected.prompt_ids
            assert answer.finish_reason == expected.finish_reason
            assert answer.version == expected.version == self.version
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=2e-3)
        return ids(own)

    def requests(self, tokens: int) -> list[Request]:
        return [Request(image, Decode.greedy(tokens)) for image in self.images]

    def train(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """Train one step, towards random answers to two of the images."""
        generator = torch.Generator().manual_seed(number)
        self.model.train()
        optimizer.zero_grad()
        for k in (2 * number, 2 * number + 1):
            image = self.images[k % len(self.images)]
            first = self.table.first_coord
            answer = torch.randint(first - 100, first + 1000, (24,), generator=generator)
            self._loss(image, answer).backward()
        optimizer.step()

    def _loss(self, image: ImageRef, answer: Tensor) -> Tensor:
        prompt = torch.tensor(self.prompts.ids(*image.size))
        patches, grid = self.prompts.pixels(image.path, image.size)
        ids = torch.cat([prompt, answer])[None]
        kinds = (ids == self.prompts.image_token).int()
        logits = self.model(
            input_ids=ids, mm_token_type_ids=kinds, pixel_values=patches, image_grid_thw=grid
        ).logits
        return torch.nn.functional.cross_entropy(logits[0, len(prompt) - 1 : -1], answer)


def ids(rollouts: Sequence[Rollout]) -> list[tuple[int, ...]]:
    return [rollout.ids for rollout in rollouts]
