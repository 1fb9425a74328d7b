"""Run-length masks of COCO, compressed or not, to the outlines of their parts.

An outline runs along the edges of pixels, so it encloses exactly the pixels of its part. Pixels that touch at a
corner are one part. A hole has no place in a single ring: it is counted, and its pixels become part of the shape.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordexp.data.importers.source import Ring, area

_STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # right, down, left, up: the inside is at the right hand


def decode(segmentation: dict[str, Any], width: int, height: int) -> NDArray[np.bool_]:
    """The mask, rows by columns. ValueError says what is wrong; a broken one never reaches C code."""
    if segmentation.get("size") != [height, width]:
        raise ValueError("the size of a mask is not that of its image")
    counts = segmentation.get("counts")
    runs = _uncompressed(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or not all(type(run) is int and run >= 0 for run in runs):
        raise ValueError("the runs of a mask are not whole numbers from 0")
    if sum(runs) != width * height:
        raise ValueError("the runs of a mask do not add up to its image")
    columns = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return columns.reshape(width, height).T


def _uncompressed(text: str) -> list[int]:
    """COCO's own packing: six bits a character, the lowest first; from the fourth run on, differences."""
    runs: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError("the packed runs of a mask cannot be read")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("the packed runs of a mask end in the middle of a number")
    return runs


def trace(mask: NDArray[np.bool_]) -> tuple[list[Ring], int]:
    """The outer rings of the parts, from the top, and the number of holes that they fill."""
    ways, starts = _edges(mask)
    used: set[tuple[int, int]] = set()
    rings, holes = [], 0
    for start in starts:
        if start in used:
            continue
        ring = _walk(start, ways, used)
        if area(ring) > 0:
            rings.append(ring)
        else:
            holes += 1
    return rings, holes


def _edges(mask: NDArray[np.bool_]) -> tuple[dict[tuple[int, int], list[int]], list[tuple[int, int]]]:
    """The directions in which the outline leaves each corner, and the corners where an upper edge begins."""
    wide = np.pad(mask, 1)
    inner = wide[1:-1, 1:-1]
    neighbours = (wide[:-2, 1:-1], wide[1:-1, 2:], wide[2:, 1:-1], wide[1:-1, :-2])  # above, right, below, left
    begins = ((0, 0), (1, 0), (1, 1), (0, 1))
    ways: dict[tuple[int, int], list[int]] = {}
    for way, (neighbour, (right, down)) in enumerate(zip(neighbours, begins, strict=True)):
        ys, xs = np.nonzero(inner & ~neighbour)
        for corner in zip((xs + right).tolist(), (ys + down).tolist(), strict=True):
            ways.setdefault(corner, []).append(way)
    return ways, [corner for corner, found in ways.items() if 0 in found]


def _walk(start: tuple[int, int], ways: dict[tuple[int, int], list[int]], used: set[tuple[int, int]]) -> Ring:
    """Once around from an upper edge. Where two outlines meet at a corner, a left turn keeps them together."""
    ring: list[float] = []
    at, way, before = start, 0, -1
    while at != start or way != 0 or before < 0:
        if way == 0:
            used.add(at)
        if way != before:
            ring += at
        at = (at[0] + _STEPS[way][0], at[1] + _STEPS[way][1])
        before = way
        way = ways[at][0] if len(ways[at]) == 1 else (way - 1) % 4
    return tuple(map(float, ring))
