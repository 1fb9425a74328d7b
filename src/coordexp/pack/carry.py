"""Training examples, and the carry buffer: the segments of one rank that wait for a row, oldest first.

A segment that does not fit into a row waits for the next one. None is split, and none is dropped before the end of
the run. The wait is bounded: a segment that arrives after n others is in one of the next n + 1 rows.
"""

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

from coordexp.config.sections import Channel
from coordexp.correction import Segment
from coordexp.errors import UserError
from coordexp.pack.select import require_binpacking, select

T = TypeVar("T", bound=Sized)


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
    """A segment with its image, ready to be packed into a row.

    `image` is the path of the image. It is read when the row is made, so that waiting examples hold no pixels.
    `size` is the width and height that the prompt was made for. `id` is None for an example made outside training,
    or restored from a checkpoint of a release that did not save ids."""

    segment: Segment
    image: str
    size: tuple[int, int]
    channel: Channel
    id: ExampleId | None = None

    def __len__(self) -> int:
        return len(self.segment)


class PackingError(UserError, ValueError):
    """Segments that cannot be packed with the given settings."""


@dataclass(frozen=True)
class RowReport:
    """How a row was packed. `fill` is the share of its capacity that is used, `oldest_waited` the number of rows
    that its oldest segment has waited for, and `waiting` the number of segments that still wait."""

    fill: float
    segments: int
    oldest_waited: int
    waiting: int
    underfull: bool


@dataclass(frozen=True)
class PackedRow(Generic[T]):
    items: tuple[T, ...]
    report: RowReport


class CarryBuffer(Generic[T]):
    """Holds at most `limit` waiting segments (`training.packing_buffer`) and draws rows of up to `capacity`
    tokens."""

    def __init__(self, capacity: int, limit: int, min_fill_ratio: float = 0.0) -> None:
        require_binpacking()  # fail now, and not after the first rollouts
        self.capacity = capacity
        self.limit = limit
        self.min_fill_ratio = min_fill_ratio
        self.rows = 0
        self._waiting: list[tuple[T, int]] = []  # each with the number of rows drawn before it was added

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        return sum(len(item) for item, _ in self._waiting)

    def add(self, item: T) -> None:
        if len(item) > self.capacity:
            raise PackingError(
                f"a segment of {len(item)} tokens does not fit into a row of {self.capacity}",
                "raise global_max_length, lower rollout_matching.max_new_tokens if it comes from a rollout, or "
                "remove the record from the data",
            )
        if not len(item):
            raise PackingError("a segment without tokens cannot be trained on")
        if len(self._waiting) >= self.limit:
            raise PackingError(
                f"{len(self._waiting)} segments ({self.tokens:,} tokens) wait for rows of {self.capacity:,}, "
                f"but training.packing_buffer is {self.limit}",
                "raise training.packing_buffer and continue with --resume, or start a new run with a smaller "
                "training.per_device_train_batch_size",
            )
        self._waiting.append((item, self.rows))

    def draw(self) -> PackedRow[T]:
        """Return the next row. The segments that are not in it stay in the buffer."""
        chosen = select([len(item) for item, _ in self._waiting], self.capacity)
        items = tuple(self._waiting[index][0] for index in chosen)
        fill = sum(map(len, items)) / self.capacity
        report = RowReport(
            fill=fill,
            segments=len(items),
            oldest_waited=self.rows - self._waiting[0][1],
            waiting=len(self._waiting) - len(items),
            underfull=fill < self.min_fill_ratio,
        )
        taken = set(chosen)
        self._waiting = [entry for index, entry in enumerate(self._waiting) if index not in taken]
        self.rows += 1
        return PackedRow(items, report)

    @property
    def waiting(self) -> tuple[tuple[T, int], ...]:
        """The waiting segments, oldest first, each with the number of rows drawn before it was added."""
        return tuple(self._waiting)

    def restore(self, waiting: Iterable[tuple[T, int]], rows: int) -> None:
        """Replace the contents by a saved state. The buffer keeps its own capacity and limit."""
        self.rows, self._waiting = rows, []
        for item, arrived in waiting:
            self.add(item)
            self._waiting[-1] = (item, arrived)
