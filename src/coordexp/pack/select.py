"""Choose which of the waiting segments make the next row. The choice is a pure function of their lengths.

Three selections compete: first in first out, the constant-volume heuristic of `binpacking` over all waiting
segments, and the exact best subset of the oldest ones. The fullest wins, so a row is never emptier than first in
first out would make it. All three contain the oldest segment, so every row moves each waiting segment at least one
place forward.
"""

import importlib.util
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from coordexp.errors import UserError

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
