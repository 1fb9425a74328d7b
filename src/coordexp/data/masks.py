"""Masks as run lengths, compressed or not, and the outlines of their parts."""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as rle

from coordexp.data.geometry import ring_area
from coordexp.data.images import MOST_PIXELS

_STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # right, down, left, up: the inside is to the right of each step
_TEXT = re.compile("([P-o]{0,6}[0-O])+")  # numbers: five bits per character, and up to O the last ones


def decode_mask(segmentation: dict[str, Any], width: int, height: int) -> NDArray[np.bool_]:
    """Return a mask of COCO, rows by columns. Raise ValueError if it is broken.

    pycocotools refuses runs that are too long. It does not notice a text that ends in the middle of a number, and
    reads beyond it, nor runs that are too short, of which it leaves the rest of the pixels undefined."""
    if segmentation.get("size") != [height, width]:
        raise ValueError("the size of a mask differs from that of its image")
    counts, area = segmentation.get("counts"), width * height
    if area > MOST_PIXELS:
        raise ValueError(f"a mask has more than {MOST_PIXELS} pixels")
    if isinstance(counts, list):
        if not all(type(run) is int and run >= 0 for run in counts):
            raise ValueError("the runs of a mask are not whole numbers from 0")
        if sum(counts) != area:
            raise ValueError("the runs of a mask do not add up to the size of its image")
        runs = rle.frPyObjects(segmentation, height, width)
    elif isinstance(counts, str) and _TEXT.fullmatch(counts):
        runs = {"size": [height, width], "counts": counts.encode("ascii")}
        if _fits(runs | {"size": [area - 1, 1]}) or not _fits(runs):
            raise ValueError("the runs of a mask do not add up to the size of its image")
    else:
        raise ValueError("the compressed runs of a mask cannot be read")
    return rle.decode(runs).astype(bool)  # type: ignore[no-any-return]


def _fits(runs: dict[str, Any]) -> bool:
    """Return True if compressed runs are not longer than their size."""
    try:
        rle.decode(runs)
    except ValueError:
        return False
    return True


def trace_outlines(mask: NDArray[np.bool_]) -> tuple[list[tuple[float, ...]], int]:
    """Return the outer rings of the parts, from the top, and the number of holes that they fill.

    An outline runs along the edges of pixels, so it encloses exactly the pixels of its part. Pixels that touch at
    a corner belong to one part. A single ring cannot have a hole: the pixels of holes become part of the shape."""
    padded = np.pad(mask, 1)
    leaving: dict[tuple[int, int], list[int]] = {}  # the directions in which outlines leave each corner
    for direction, (x, y) in enumerate(((-1, -1), (0, -1), (0, 0), (-1, 0))):  # where an edge of a pixel begins
        dx, dy = _STEPS[direction - 1]  # to the pixel behind this edge
        ys, xs = np.nonzero(padded & ~np.roll(padded, (-dy, -dx), (0, 1)))
        for corner in zip((xs + x).tolist(), (ys + y).tolist(), strict=True):
            leaving.setdefault(corner, []).append(direction)
    rings, holes, used = list[tuple[float, ...]](), 0, set[tuple[int, int]]()
    for start in [corner for corner, directions in leaving.items() if 0 in directions]:  # upper edges
        if start in used:
            continue
        ring: list[float] = []
        corner, direction, before = start, 0, -1
        while before < 0 or (corner, direction) != (start, 0):
            if direction == 0:
                used.add(corner)
            if direction != before:
                ring += corner
            corner = (corner[0] + _STEPS[direction][0], corner[1] + _STEPS[direction][1])
            before, directions = direction, leaving[corner]
            # Where two outlines meet at a corner, turning left keeps them together.
            direction = directions[0] if len(directions) == 1 else (direction - 1) % 4
        if ring_area(ring) > 0:
            rings.append(tuple(map(float, ring)))
        else:
            holes += 1
    return rings, holes
