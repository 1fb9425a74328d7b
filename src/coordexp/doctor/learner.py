"""A learner of one process, as in training: a model on its device, its own answers, and the backends that get its
weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.doctor.outcome import Agreement
from coordexp.doctor.workspace import Workspace, read_settings
from coordexp.engine.colocate import ColocateBackend
from coordexp.engine.start import EngineSetup
from coordexp.rollout.backend import Decode, Request, Rollout, RolloutBackend
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder
from coordexp.servers.backend import ServerBackend
from coordexp.train.offload import OffloadedStorages
from coordexp.train.weights import learner_weights
from coordexp.vocab import VocabularyTable

NOISE = 0.5  # in standard deviations of each matrix
TOKENS = 16  # of the answers that are compared


class TinyLearner:
    """A tiny model, and the backend (`own`) that answers with it."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.dtype = workspace, workspace.machine.dtype
        self.device = torch.device("cuda:0" if workspace.machine.kind == "cuda" else "cpu")
        self.model: Any = self._load().to(self.device)
        self.prompts = PromptBuilder(AutoProcessor.from_pretrained(workspace.model), "Detect all objects.")
        self.table = VocabularyTable.from_folder(workspace.model)
        self.images = workspace.images()
        self.own = HuggingFaceBackend(lambda: self.model, self.prompts, self.table, len(self.images))

    def _load(self) -> Any:
        dtype = getattr(torch, self.dtype)
        return Qwen3VLForConditionalGeneration.from_pretrained(self.workspace.model, dtype=dtype)

    def connect_servers(
        self, config: Any, notify: Callable[[str], None], record: Callable[[dict[str, Any]], None]
    ) -> ServerBackend:
        """Return the backend for the rollout servers of a config."""
        return ServerBackend(self._setup(config), self.prompts, self.own, self.images[0], notify, record)

    def start_colocated(self, config: Any) -> ColocateBackend:
        """Return the backend for an engine on the learner's own device."""
        return ColocateBackend(self._setup(config), self.prompts, self.own, self.images[0], _keep_in_memory)

    def _setup(self, config: Any) -> EngineSetup:
        rollout = read_settings(config).rollout_matching
        return EngineSetup(self.workspace.model, self.dtype, rollout, self.table, self.device)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as an engine gets them."""
        return learner_weights(self.model)

    def requests(self, decode: Decode | None = None, times: int = 1) -> list[Request]:
        """Return one request per image, each of them `times` times."""
        return [Request(image, decode or Decode.greedy(TOKENS)) for image in self.images * times]

    def compare(self, backend: RolloutBackend) -> Agreement:
        """Compare the learner's answers to all images with those of a backend."""
        return Agreement.of(*self._ask_both(backend), self.dtype)

    def compare_by_image(self, backend: RolloutBackend) -> list[Agreement]:
        """Return one agreement per image."""
        pairs = zip(*self._ask_both(backend), strict=True)
        return [Agreement.of([own], [theirs], self.dtype) for own, theirs in pairs]

    def _ask_both(self, backend: RolloutBackend) -> tuple[Sequence[Rollout], Sequence[Rollout]]:
        requests = self.requests()
        return self.own.generate(requests), backend.generate(requests)

    @torch.no_grad()
    def change(self, seed: int) -> None:
        """Change the weights so much that the answers change."""
        draws = torch.Generator().manual_seed(seed)
        for weight in self.model.parameters():
            if weight.ndim >= 2:
                noise = torch.randn(weight.shape, generator=draws).to(weight)
                weight.add_(NOISE * weight.std() * noise)

    @torch.no_grad()
    def make_repetitive(self) -> None:
        """Change the weights so that the model repeats its last token with near certainty.

        No layer adds anything to the embedding of that token any more, and the output head is the embedding."""
        for name, weight in self.model.model.language_model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to the weights of the checkpoint."""
        for weight, first in zip(self.model.parameters(), self._load().parameters(), strict=True):
            weight.copy_(first)


def _keep_in_memory() -> AbstractContextManager[OffloadedStorages]:
    """Offload nothing while the engine generates."""
    return nullcontext(OffloadedStorages())
