"""Decode the run-length masks of COCO, compressed or not, and trace the outlines of their parts.

An outline runs along the edges of pixels, so it encloses exactly the pixels of its part. Pixels that touch at a
corner belong to one part. A single ring cannot have a hole: holes are counted, and their pixels become part of the
shape.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordexp.data.importers.source import Ring, ring_area

_STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # right, down, left, up: the inside is to the right of each step


def decode_mask(segmentation: dict[str, Any], width: int, height: int) -> NDArray[np.bool_]:
    """Return the mask, rows by columns. Raise ValueError if it is broken: no broken mask reaches C code."""
    if segmentation.get("size") != [height, width]:
        raise ValueError("the size of a mask differs from that of its image")
    counts = segmentation.get("counts")
    runs = _decompress(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or not all(type(run) is int and run >= 0 for run in runs):
        raise ValueError("the runs of a mask are not whole numbers from 0")
    if sum(runs) != width * height:
        raise ValueError("the runs of a mask do not add up to the size of its image")
    columns = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return columns.reshape(width, height).T


def _decompress(text: str) -> list[int]:
    """Return the runs of COCO's own format: numbers in characters of six bits, the lowest bits first. From the
    fourth run on, they are differences from the run before the last."""
    runs: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError("the compressed runs of a mask cannot be read")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("the compressed runs of a mask end in the middle of a number")
    return runs


def trace_outlines(mask: NDArray[np.bool_]) -> tuple[list[Ring], int]:
    """Return the outer rings of the parts, from the top, and the number of holes that they fill."""
    directions, starts = _find_edges(mask)
    used: set[tuple[int, int]] = set()
    rings, holes = [], 0
    for start in starts:
        if start in used:
            continue
        ring = _walk(start, directions, used)
        if ring_area(ring) > 0:
            rings.append(ring)
        else:
            holes += 1
    return rings, holes


def _find_edges(mask: NDArray[np.bool_]) -> tuple[dict[tuple[int, int], list[int]], list[tuple[int, int]]]:
    """Return the directions in which outlines leave each corner, and the corners where an upper edge begins."""
    padded = np.pad(mask, 1)
    inner = padded[1:-1, 1:-1]
    above, right, below, left = padded[:-2, 1:-1], padded[1:-1, 2:], padded[2:, 1:-1], padded[1:-1, :-2]
    begins = ((0, 0), (1, 0), (1, 1), (0, 1))  # the corner of a pixel from which its edge on that side starts
    directions: dict[tuple[int, int], list[int]] = {}
    for direction, (neighbour, (dx, dy)) in enumerate(zip((above, right, below, left), begins, strict=True)):
        ys, xs = np.nonzero(inner & ~neighbour)
        for corner in zip((xs + dx).tolist(), (ys + dy).tolist(), strict=True):
            directions.setdefault(corner, []).append(direction)
    return directions, [corner for corner, leaving in directions.items() if 0 in leaving]


def _walk(
    start: tuple[int, int], directions: dict[tuple[int, int], list[int]], used: set[tuple[int, int]]
) -> Ring:
    """Return one outline, followed once around from an upper edge. Where two outlines meet at a corner, turning
    left keeps them together."""
    ring: list[float] = []
    corner, direction, previous = start, 0, -1
    while corner != start or direction != 0 or previous < 0:
        if direction == 0:
            used.add(corner)
        if direction != previous:
            ring += corner
        corner = (corner[0] + _STEPS[direction][0], corner[1] + _STEPS[direction][1])
        previous = direction
        direction = directions[corner][0] if len(directions[corner]) == 1 else (direction - 1) % 4
    return tuple(map(float, ring))
