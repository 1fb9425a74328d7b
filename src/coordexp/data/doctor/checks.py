"""What one record can tell about itself. Pure: the image, if it was read, comes in as facts."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from coordexp.data.coordinates import BINS, to_bin
from coordexp.data.images import ImageFacts, size_problem
from coordexp.data.records import Record, RecordObject
from coordexp.data.sample import degenerate
from coordexp.text import encodable

FAR = 0.01  # share of the image by which a shape may leave it before it is an error
HALF_A_BIN = 0.5 / (BINS - 1)
THIN = frozenset({"n/a", "na", "nan", "none", "null", "undefined", "unknown", "todo", "unlabeled", "unlabelled"})


@dataclass(frozen=True, slots=True)
class Problem:
    """`code` is a key of `KINDS`."""

    code: str
    detail: str


def check_record(record: Record) -> tuple[Problem, ...]:
    """A record without an error among these can become a sample."""
    problems: list[Problem] = []
    if unusable := size_problem(record.width, record.height):
        problems.append(Problem("image-size", f"{record.image!r}: {unusable}"))
    seen: dict[tuple[object, ...], int] = {}
    for index, found in enumerate(record.objects):
        bins = bins_of(record, found)
        problems += _check_shape(record, found, bins, index)
        desc = _desc_code(found.desc)
        if desc is not None:
            problems.append(Problem(desc, _named(found, index)))
        earlier = seen.setdefault((found.desc, found.kind, bins), index)
        if earlier != index:
            problems.append(Problem("duplicate-object", f"{_named(found, index)} is objects[{earlier}] again"))
    return tuple(problems)


def check_image(record: Record, facts: ImageFacts) -> tuple[Problem, ...]:
    stated, real = (record.width, record.height), (facts.width, facts.height)
    if stated == real:
        return ()
    why = ""
    if stated == real[::-1]:
        why = "; stored on its side, with EXIF data that turn it" if facts.turned else "; they are swapped"
    detail = f"stated {stated[0]} x {stated[1]}, real {real[0]} x {real[1]}{why}"
    return (Problem("size-mismatch", detail),)


def bins_of(record: Record, found: RecordObject) -> tuple[int, ...]:
    extent = record.extent
    return tuple(to_bin(value, extent[k % 2]) for k, value in enumerate(found.coords))


def _check_shape(record: Record, found: RecordObject, bins: tuple[int, ...], index: int) -> Iterator[Problem]:
    coords, extent = found.coords, record.extent
    inverted = found.kind == "bbox_2d" and (coords[2] < coords[0] or coords[3] < coords[1])
    over = max(_over(coords[k::2], extent[k]) for k in (0, 1))
    flat = degenerate(found.kind, coords)
    if over <= 0 and not inverted and not flat and not degenerate(found.kind, bins):
        return  # the way of almost all
    shown = f"{_named(found, index)} {_shown(found)}"
    if inverted:
        yield Problem("inverted", shown)
    if over > FAR:
        yield Problem("outside", f"{shown} in {_size(extent)}")
    elif over > HALF_A_BIN:
        yield Problem("over-the-edge", f"{shown} in {_size(extent)}")
    if inverted:
        return
    if flat:
        yield Problem("no-area", shown)
    elif over <= FAR and degenerate(found.kind, bins):
        yield Problem("no-area-in-bins", f"{shown} in {_size(extent)}")


def _over(values: tuple[float, ...], size: float) -> float:
    """How far they leave 0 to `size`, as a share of it."""
    return max(-min(values), max(values) - size) / size


@lru_cache(maxsize=65536)
def _desc_code(desc: str) -> str | None:
    if not encodable(desc):
        return "desc-broken"
    word = desc.strip()
    thin = word.lower() in THIN or not re.search(r"\w", word) or (len(word) == 1 and word.isascii())
    return "desc-thin" if thin else None


def _named(found: RecordObject, index: int) -> str:
    return f"objects[{index}] {found.desc if len(found.desc) < 40 else found.desc[:36] + '...'!r}"


def _shown(found: RecordObject) -> str:
    numbers = [f"{value:g}" for value in found.coords[:8]]
    return f"{found.kind} [{', '.join(numbers)}{', ...' if len(found.coords) > 8 else ''}]"


def _size(extent: tuple[float, float]) -> str:
    return f"{extent[0]:g} x {extent[1]:g}"
