"""What an engine gives back for one picture. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Picture:
    """`name` is the path as the data has it, `path` where the file is."""

    name: str
    path: str
    width: int
    height: int


@dataclass(frozen=True)
class Generated:
    """`ids` are without the stop token. `logprobs` are of the model itself, before any sampling setting."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
