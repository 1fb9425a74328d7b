"""A learner of one process, as training has it: a model on its device, its own answers, and the backends that get
its weights."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.doctor.outcome import Agreement
from coordexp.doctor.workplace import Workplace, settings_of
from coordexp.rollout.backend import Decode, Request, Rollout, RolloutBackend
from coordexp.rollout.colocate import ColocateBackend
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder
from coordexp.rollout.server_backend import ServerBackend
from coordexp.rollout.setup import Setup
from coordexp.train.spill import Away
from coordexp.train.weights import learner_weights
from coordexp.vocab import VocabularyTable

NOISE = 0.5  # of the deviation of each matrix
TOKENS = 16  # of the answers that are compared


class TinyLearner:
    def __init__(self, place: Workplace) -> None:
        self.place, self.dtype = place, place.machine.dtype
        self.device = torch.device("cuda:0" if place.machine.kind == "cuda" else "cpu")
        kind = getattr(torch, self.dtype)
        self.model: Any = Qwen3VLForConditionalGeneration.from_pretrained(place.model, dtype=kind).to(self.device)
        self.prompts = PromptBuilder(AutoProcessor.from_pretrained(place.model), "Detect all objects.")
        self.table = VocabularyTable.from_folder(place.model)
        self.pictures = place.pictures()
        self.own = HuggingFaceBackend(lambda: self.model, self.prompts, self.table, len(self.pictures))

    def servers(
        self, config: Any, tell: Callable[[str], None], record: Callable[[dict[str, Any]], None]
    ) -> ServerBackend:
        rollout = settings_of(config).rollout_matching
        about = Setup(self.place.model, self.dtype, rollout, self.table, self.device)
        return ServerBackend(about, self.prompts, self.own, self.pictures[0], tell, record)

    def colocated(self, config: Any) -> ColocateBackend:
        rollout = settings_of(config).rollout_matching
        about = Setup(self.place.model, self.dtype, rollout, self.table, self.device)
        return ColocateBackend(about, self.prompts, self.own, self.pictures[0], lambda: nullcontext(Away()))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return learner_weights(self.model)

    def requests(self, decode: Decode | None = None, times: int = 1) -> list[Request]:
        return [Request(picture, decode or Decode.greedy(TOKENS)) for picture in self.pictures * times]

    def agreement(self, backend: RolloutBackend) -> Agreement:
        return Agreement.of(*self._both(backend), self.dtype)

    def agreements(self, backend: RolloutBackend) -> list[Agreement]:
        """One a picture."""
        pairs = zip(*self._both(backend), strict=True)
        return [Agreement.of([own], [theirs], self.dtype) for own, theirs in pairs]

    def _both(self, backend: RolloutBackend) -> tuple[Sequence[Rollout], Sequence[Rollout]]:
        requests = self.requests()
        return self.own.generate(requests), backend.generate(requests)

    @torch.no_grad()
    def change(self, seed: int) -> None:
        """To other weights, with other answers."""
        draws = torch.Generator().manual_seed(seed)
        for weight in self.model.parameters():
            if weight.ndim >= 2:
                noise = torch.randn(weight.shape, generator=draws).to(weight)
                weight.add_(NOISE * weight.std() * noise)

    @torch.no_grad()
    def loop(self) -> None:
        """To weights that repeat the last token, very surely: no layer adds anything to its embedding, which is
        the output head too."""
        for name, weight in self.model.model.language_model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()

    @torch.no_grad()
    def restore(self) -> None:
        """The weights of the checkpoint."""
        fresh = Qwen3VLForConditionalGeneration.from_pretrained(self.place.model, dtype=getattr(torch, self.dtype))
        for weight, first in zip(self.model.parameters(), fresh.parameters(), strict=True):
            weight.copy_(first)
