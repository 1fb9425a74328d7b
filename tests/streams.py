"""A stream of segments that are packed into rows of 16,000 tokens, with different ways to select."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.objective.carry import first_in_first_out

__all__ = ["CAPACITY", "WAITING", "Stream", "closed_when_full", "first_in_first_out", "rollout_lengths", "stream"]

CAPACITY = 16_000
WAITING = 64  # segments that wait before each row
WARM_UP = 10  # rows


@dataclass(frozen=True)
class Stream:
    """The fill of the rows between warm-up and the end of the stream, and how many rows the oldest segment of
    each row waited."""

    fills: list[float]
    waits: list[int]


def rollout_lengths(count: int, seed: int) -> list[int]:
    """Return lengths like those of real rollouts: log-normal, half below 2,400, nine tenths below 5,000, at
    most 16,000."""
    spread = np.log(5000 / 2400) / 1.2816
    drawn = np.random.default_rng(seed).lognormal(np.log(2400), spread, count)
    return [int(length) for length in drawn.clip(64, CAPACITY)]


def stream(lengths: Sequence[int], choose: Callable[[Sequence[int], int], tuple[int, ...]]) -> Stream:
    rest, waiting, rows = list(lengths), list[tuple[int, int]](), 0
    fills, waits = [], []
    while rest or waiting:
        while rest and len(waiting) < WAITING:
            waiting.append((rest.pop(0), rows))
        full = bool(rest)
        chosen = set(choose([length for length, _ in waiting], CAPACITY))
        if full and rows >= WARM_UP:
            fills.append(sum(waiting[i][0] for i in chosen) / CAPACITY)
        waits.append(max(rows - waiting[i][1] for i in chosen))
        waiting = [entry for i, entry in enumerate(waiting) if i not in chosen]
        rows += 1
    return Stream(fills, waits)


def closed_when_full(lengths: Sequence[int]) -> list[float]:
    """Return the fill of rows that are closed as soon as the next segment does not fit, without a buffer."""
    fills, row = [], 0
    for length in lengths:
        if row + length > CAPACITY:
            fills.append(row / CAPACITY)
            row = 0
        row += length
    return fills
