"""A colocated engine, and the learner that it serves. Tests exchange the learner: an engine is slow to start."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoProcessor

from coordexp.config import RolloutMatching
from coordexp.demo.scenes import SceneSettings
from coordexp.demo.write_scenes import write_scenes
from coordexp.rollout.backend import Decode, Picture, Request, Rollout
from coordexp.rollout.colocate import ColocateBackend
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder
from coordexp.rollout.setup import Setup
from coordexp.train.adapter_weights import learner_adapter
from coordexp.train.spill import Away
from coordexp.train.weights import learner_weights
from coordexp.vocab import VocabularyTable
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


def draw_pictures(folder: Path) -> list[Picture]:
    """16 of four sizes, which take turns."""
    for side in SIDES:
        write_scenes(folder / str(side), SceneSettings(side=side), train=1, val=4, seed=side, advance=lambda: None)
    return [
        Picture(str(folder / f"{side}/images/val/{k:07d}.png"), side, side) for k in range(4) for side in SIDES
    ]


def with_adapter_sync(settings: RolloutMatching, rank: int) -> RolloutMatching:
    """The settings of a run whose engine takes adapters up to this rank."""
    sync = settings.vllm.sync.model_copy(update={"mode": "adapter"})
    vllm = settings.vllm.model_copy(update={"enable_lora": True, "max_lora_rank": rank, "sync": sync})
    return settings.model_copy(update={"vllm": vllm})


class Colocation:
    """`said` and `recorded` are what the backend tells the user and writes to the run's manifest."""

    def __init__(self, folder: Path, pictures: Sequence[Picture], settings: RolloutMatching = SETTINGS) -> None:
        self.folder, self.pictures = folder, pictures
        self.said: list[str] = []
        self.recorded: list[dict[str, Any]] = []
        self.prompts = PromptBuilder(AutoProcessor.from_pretrained(folder), "Detect all objects.")
        self.table = VocabularyTable.from_folder(folder)
        self.model: Any = whole_model(folder)
        self.room: Callable[[], AbstractContextManager[Away]] = lambda: nullcontext(Away())
        self.learner = HuggingFaceBackend(lambda: self.model, self.prompts, self.table, 16)
        self.backend = ColocateBackend(
            Setup(folder, "float32", settings, self.table, torch.device("cpu")),
            self.prompts,
            self.learner,
            pictures[0],
            room=lambda: self.room(),
            tell=self.said.append,
            adapter=lambda: learner_adapter(self.model),
            record=self.recorded.append,
        )
        self.version = 0

    @property
    def tied(self) -> bool:
        return bool(self.model.config.tie_word_embeddings)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return learner_weights(self.model)

    def sync(self, version: int | None = None) -> None:
        """Inside a session."""
        self.version = self.version + 1 if version is None else version
        self.backend.sync(self.weights, self.version)
        self.learner.sync(self.weights, self.version)

    def requests(self, tokens: int) -> list[Request]:
        return [Request(picture, Decode.greedy(tokens)) for picture in self.pictures]

    def train(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """One step, to other answers for two of the pictures."""
        generator = torch.Generator().manual_seed(number)
        self.model.train()
        optimizer.zero_grad()
        for k in (2 * number, 2 * number + 1):
            picture = self.pictures[k % len(self.pictures)]
            first = self.table.first_coord
            wanted = torch.randint(first - 100, first + 1000, (24,), generator=generator)
            self._loss(picture, wanted).backward()
        optimizer.step()

    def _loss(self, picture: Picture, wanted: Tensor) -> Tensor:
        prompt = torch.tensor(self.prompts.ids(*picture.size))
        patches, grid = self.prompts.pixels(picture.path, picture.size)
        ids = torch.cat([prompt, wanted])[None]
        kinds = (ids == self.prompts.image_token).int()
        logits = self.model(
            input_ids=ids, mm_token_type_ids=kinds, pixel_values=patches, image_grid_thw=grid
        ).logits
        return torch.nn.functional.cross_entropy(logits[0, len(prompt) - 1 : -1], wanted)

    @contextmanager
    def cached_tokens(self, monkeypatch: Any) -> Iterator[list[int]]:
        """Of each prompt that the engine reads, how many tokens it had computed before."""
        found: list[int] = []
        plain = self.backend.engine.generate

        def spied(*given: Any, **named: Any) -> Any:
            outputs = plain(*given, **named)
            found.extend(output.num_cached_tokens for output in outputs)
            return outputs

        with monkeypatch.context() as patch:
            patch.setattr(self.backend.engine, "generate", spied)
            yield found


def ids(rollouts: Sequence[Rollout]) -> list[tuple[int, ...]]:
    return [one.ids for one in rollouts]
