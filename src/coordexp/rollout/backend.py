"""What every engine takes and gives back, and the interface that it is used through. Imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from coordexp.config.rollout import DecodeMode, RepeatTerminate, RolloutMatching
from coordexp.data import Record, RecordFile
from coordexp.vocab.table import VocabularyTable

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "repeat"]  # by itself, at the token limit, by the repeat guard


@dataclass(frozen=True)
class Picture:
    """A file, and the size it must have."""

    path: str
    width: int
    height: int

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @classmethod
    def of(cls, records: RecordFile, record: Record) -> "Picture":
        return cls(str(records.image_path(record)), record.width, record.height)


@dataclass(frozen=True)
class Decode:
    """How tokens are chosen, and when an answer ends. `greedy(n)` is what `predict` uses."""

    max_new_tokens: int
    mode: DecodeMode = "greedy"
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    num_beams: int = 1
    guard: RepeatTerminate = field(default_factory=RepeatTerminate)

    @classmethod
    def greedy(cls, max_new_tokens: int) -> "Decode":
        return cls(max_new_tokens)

    @classmethod
    def of(cls, settings: RolloutMatching) -> "Decode":
        """As a run's settings have it, for training."""
        sampling = settings.decoding
        return cls(
            settings.max_new_tokens,
            settings.mode_of_decoding,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            settings.num_beams or 1,
            settings.repeat_terminate,
        )

    @classmethod
    def for_evaluation(cls, settings: RolloutMatching) -> "Decode":
        """Return greedy decoding with the token limit and the repeat guard of the settings."""
        return cls(settings.max_new_tokens, guard=settings.repeat_terminate)


@dataclass(frozen=True)
class Request:
    """One picture to answer. `seed` alone decides what is drawn when sampling, whatever else is in the batch."""

    picture: Picture
    decode: Decode
    seed: int = 1


@dataclass(frozen=True)
class Rollout:
    """One answer. `ids` are without the stop token, and `text` is their decoded text; backends use `of`, which
    makes it. `logprobs` are of the model itself, before any sampling setting; there are none of beam search.
    `version` is of the weights that made it."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version: int = 0

    @classmethod
    def of(
        cls,
        table: VocabularyTable,
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: FinishReason,
        version: int = 0,
    ) -> "Rollout":
        """Return the rollout of `ids`, with their text. `logprobs` may be longer than `ids`; the rest is
        dropped."""
        text = table.text_of(ids)
        return cls(tuple(prompt_ids), tuple(ids), text, tuple(logprobs[: len(ids)]), finish_reason, version)


# Whole tensors under the checkpoint's names, made when they are asked for.
Weights = Callable[[], Iterator[tuple[str, "Tensor"]]]
AdapterConfig = dict[str, Any]  # as peft writes it
AdapterWeights = tuple[AdapterConfig, Iterator[tuple[str, "Tensor"]]]


class RolloutBackend(Protocol):
    """Nothing outside of this package asks which one it is. All ranks make the same calls in the same order."""

    @property
    def requests_per_call(self) -> int:
        """How many requests of a rank to pass to `generate`, for a caller that has many and wants to look up
        between calls: enough to keep the devices busy. The same on all ranks, and known after the first sync."""

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """One answer a request, in their order. All requests of a call decode alike."""

    def session(self) -> AbstractContextManager[None]:
        """Around what belongs together: syncs and answers, with no training between. A backend that needs the
        learner's memory has it until the end."""

    def sync(self, weights: Weights, version: int) -> None:
        """From here on answers come from these weights, and carry `version`, which no other weights have."""

    def close(self) -> None:
        """Ends what the backend started."""


def one_decode(requests: Sequence[Request]) -> Decode:
    """How all requests of a call decode."""
    found = {request.decode for request in requests}
    if len(found) != 1:
        raise ValueError(f"{len(found)} ways of decoding in one call; make one call for each")
    return found.pop()
