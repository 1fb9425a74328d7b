"""What an engine gives back for one picture. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from coordexp.data import Record, RecordFile

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Picture:
    """A file, and the size it must have."""

    path: str
    width: int
    height: int

    @classmethod
    def of(cls, records: RecordFile, record: Record) -> "Picture":
        return cls(str(records.image_path(record)), record.width, record.height)


@dataclass(frozen=True)
class Generated:
    """`ids` are without the stop token. `logprobs` are of the model itself, before any sampling setting."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
