"""Training examples, and the carry buffer: the segments of one rank that wait for a row, oldest first.

A segment that does not fit into a row waits for the next one. None is split, and none is dropped before the end of
the run. The wait is bounded: a segment that arrives after n others is in one of the next n + 1 rows.

Which of the waiting segments make the next row is a pure function of their lengths (`select`). Three selections
compete: first in first out, the constant-volume heuristic of `binpacking` over all waiting segments, and the exact
best subset of the oldest ones. The fullest wins, so a row is never emptier than first in first out would make it.
All three contain the oldest segment, so every row moves each waiting segment at least one place forward.
"""

import importlib.util
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from types import ModuleType
from typing import Generic, TypeVar

import numpy as np

from coordexp.answers.segment import Segment
from coordexp.config.sections import Channel
from coordexp.errors import UserError

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

    `image` is the path of the image, or None for a question without one. It is read when the row is made, so that
    waiting examples hold no pixels. `size` is the width and height that the prompt was made for. `id` is None for
    an example made outside training. `data_set` is the number of its data set in a mixture."""

    segment: Segment
    image: str | None
    size: tuple[int, int]
    channel: Channel
    id: ExampleId | None = None
    data_set: int = 0

    @property
    def name(self) -> str:
        """The words that name the example in a message."""
        return self.image or "a question without an image"

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

    def draw(self, leave: int = 0) -> PackedRow[T]:
        """Return the next row. The segments that are not in it stay in the buffer: at least `leave` of them, of
        which there must be more."""
        chosen = select([len(item) for item, _ in self._waiting], self.capacity)
        chosen = chosen[: len(self._waiting) - leave]
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


# The exact search takes time and memory in proportion to this times the capacity: 1 ms at 16,000 tokens. It
# usually fills rows exactly, unless segments are about as long as the row.
WINDOW = 64


def select(lengths: Sequence[int], capacity: int) -> tuple[int, ...]:
    """Return the indices of the segments for one row of at most `capacity` tokens, in order. Index 0, the oldest
    segment, is always among them.

    Of selections with the same total, the one with fewer segments wins, then the one with the smaller indices.
    """
    if not lengths:
        raise ValueError("nothing waits, so there is nothing to select")
    for index, length in enumerate(lengths):
        if not 0 < length <= capacity:
            raise ValueError(f"segment {index} has {length} tokens; a row holds 1 to {capacity}")
    candidates = (
        first_in_first_out(lengths, capacity),
        _constant_volume(lengths, capacity),
        _best_of_oldest(lengths[:WINDOW], capacity),
    )
    return min(candidates, key=lambda chosen: (-sum(lengths[i] for i in chosen), len(chosen), chosen))


def require_binpacking() -> ModuleType:
    """Return the package, which is imported only if a run packs."""
    if importlib.util.find_spec("binpacking") is None:
        raise UserError(
            "training.packing is true, but the package binpacking is not installed",
            "install it (pip install binpacking), or set training.packing: false",
        )
    return importlib.import_module("binpacking")


def first_in_first_out(lengths: Sequence[int], capacity: int) -> tuple[int, ...]:
    """Take the segments in order of arrival, skipping those that do not fit any more."""
    chosen = []
    for index, length in enumerate(lengths):
        if length <= capacity:
            chosen.append(index)
            capacity -= length
    return tuple(chosen)


def split_in_order(lengths: Sequence[int], capacity: int, at_least: int = 1) -> list[slice]:
    """Cut the segments, in order of arrival, into rows of at most `capacity` tokens: as few rows as possible,
    but at least `at_least`. No row is empty, so there must be that many segments, and each must fit into a row."""
    starts, used = [0], lengths[0]
    for index, length in enumerate(lengths[1:], start=1):
        is_row_of_one = len(lengths) - index <= at_least - len(starts)
        if is_row_of_one or used + length > capacity:
            starts.append(index)
            used = 0
        used += length
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(lengths)], strict=True)]


def _constant_volume(lengths: Sequence[int], capacity: int) -> tuple[int, ...]:
    """Take the oldest segment, and the fullest bin that binpacking makes of the others in the remaining space."""
    space = capacity - lengths[0]
    fitting = {index: length for index, length in enumerate(lengths) if index and length <= space}
    bins = require_binpacking().to_constant_volume(fitting, space)
    fullest = max(bins, key=lambda bin: (sum(bin.values()), -len(bin), [-index for index in sorted(bin)]))
    return (0, *sorted(fullest))


def _best_of_oldest(lengths: Sequence[int], capacity: int) -> tuple[int, ...]:
    """Take the subset with the greatest total that contains the oldest segment, by dynamic programming over
    sums."""
    space = capacity - lengths[0]
    # fewest[i, total]: how few of the segments from i on add up to exactly `total`.
    never = len(lengths)
    fewest = np.full((len(lengths) + 1, space + 1), never, dtype=np.int16)
    fewest[-1, 0] = 0
    for index in range(len(lengths) - 1, 0, -1):
        fewest[index] = fewest[index + 1]
        length = lengths[index]
        if length <= space:
            taken = fewest[index + 1, : space + 1 - length] + 1
            np.minimum(fewest[index, length:], taken, out=fewest[index, length:])
    total = int(np.flatnonzero(fewest[min(1, never)] < never)[-1])
    chosen = [0]
    for index in range(1, len(lengths)):
        length = lengths[index]
        if length <= total and fewest[index + 1, total - length] + 1 == fewest[index, total]:
            chosen.append(index)
            total -= length
    return tuple(chosen)
