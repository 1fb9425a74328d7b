"""What waits for a row: a segment, with what the model needs besides."""

from dataclasses import dataclass

from coordexp.config.pipeline import Channel
from coordexp.correction import Segment


@dataclass(frozen=True, eq=False)
class Example:
    """`image` says where the pixels are; they are read when the row is made, and do not wait in memory. `size` is
    the width and height that the prompt was made for. `dumped` says where among the dumps of the run the example
    is written whole, as `step-000099.jsonl:2`, with lines from 0; most are not."""

    segment: Segment
    image: str
    size: tuple[int, int]
    channel: Channel
    dumped: str = ""

    def __len__(self) -> int:
        return len(self.segment)
