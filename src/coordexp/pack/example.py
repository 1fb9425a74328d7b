"""One training example: a segment with its image, ready to be packed into a row."""

from dataclasses import dataclass

from coordexp.config.sections import Channel
from coordexp.correction import Segment


@dataclass(frozen=True)
class ExampleId:
    """Identifies an example by where it was made: the optimizer step and micro-step, from 0, the rank, and its
    number within the micro-step. Unique within a run, and the same when the run is repeated."""

    step: int
    micro: int
    rank: int
    index: int


@dataclass(frozen=True, eq=False)
class Example:
    """`image` is the path of the image. It is read when the row is made, so that waiting examples hold no pixels.
    `size` is the width and height that the prompt was made for. `id` is None for an example made outside training,
    or restored from a checkpoint of a release that did not save ids."""

    segment: Segment
    image: str
    size: tuple[int, int]
    channel: Channel
    id: ExampleId | None = None

    def __len__(self) -> int:
        return len(self.segment)
