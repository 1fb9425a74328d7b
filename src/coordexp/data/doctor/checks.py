"""Checks of a single record. They are pure: facts about the image file are passed in."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from coordexp.data.geometry import BINS, is_degenerate
from coordexp.data.images import ImageFacts, size_problem
from coordexp.data.records import Record, RecordObject
from coordexp.files import is_encodable

FAR = 0.01  # share of the image by which a shape may extend beyond it before that is an error
HALF_A_BIN = 0.5 / (BINS - 1)
THIN = frozenset({"n/a", "na", "nan", "none", "null", "undefined", "unknown", "todo", "unlabeled", "unlabelled"})


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in one place. `code` is a key of `KINDS`, `detail` names the place and the values."""

    code: str
    detail: str


def check_record(record: Record) -> tuple[Problem, ...]:
    """Return the problems of a record. `true_objects` succeeds for a record without an error among them."""
    problems: list[Problem] = []
    if unusable := size_problem(record.width, record.height):
        problems.append(Problem("image-size", f"{record.image!r}: {unusable}"))
    seen: dict[tuple[object, ...], int] = {}
    for index, item in enumerate(record.objects):
        bins = record.in_bins(item)
        problems += _check_shape(record, item, bins, index)
        if code := _desc_problem(item.desc):
            problems.append(Problem(code, _format_name(item, index)))
        earlier = seen.setdefault((item.desc, item.kind, bins), index)
        if earlier != index:
            problems.append(Problem("duplicate-object", f"{_format_name(item, index)} repeats objects[{earlier}]"))
    return tuple(problems)


def check_image(record: Record, facts: ImageFacts) -> tuple[Problem, ...]:
    """Return a problem if the record states another size than its image has."""
    stated, real = (record.width, record.height), (facts.width, facts.height)
    if stated == real:
        return ()
    reason = ""
    if stated == real[::-1]:
        rotated = "; the image is stored on its side, with EXIF data that rotate it"
        reason = rotated if facts.is_rotated else "; width and height are swapped"
    detail = f"stated {stated[0]} x {stated[1]}, real {real[0]} x {real[1]}{reason}"
    return (Problem("size-mismatch", detail),)


def _check_shape(record: Record, item: RecordObject, bins: tuple[int, ...], index: int) -> Iterator[Problem]:
    coords, extent = item.coords, record.extent
    inverted = item.kind == "bbox_2d" and (coords[2] < coords[0] or coords[3] < coords[1])
    excess = max(_excess(coords[k::2], extent[k]) for k in (0, 1))
    flat = is_degenerate(item.kind, coords)
    if excess <= 0 and not inverted and not flat and not is_degenerate(item.kind, bins):
        return  # almost all shapes: no text is built for them
    shown = f"{_format_name(item, index)} {_format_shape(item)}"
    if inverted:
        yield Problem("inverted", shown)
    if excess > FAR:
        yield Problem("outside", f"{shown} in {_format_size(extent)}")
    elif excess > HALF_A_BIN:
        yield Problem("over-the-edge", f"{shown} in {_format_size(extent)}")
    if inverted:
        return
    if flat:
        yield Problem("no-area", shown)
    elif excess <= FAR and is_degenerate(item.kind, bins):
        yield Problem("no-area-in-bins", f"{shown} in {_format_size(extent)}")


def _excess(values: tuple[float, ...], size: float) -> float:
    """Return how far the values extend beyond 0 to `size`, as a share of it."""
    return max(-min(values), max(values) - size) / size


@lru_cache(maxsize=65536)
def _desc_problem(desc: str) -> str | None:
    """Return the code of what is wrong with a description, or None."""
    if not is_encodable(desc):
        return "desc-broken"
    word = desc.strip()
    thin = word.lower() in THIN or not re.search(r"\w", word) or (len(word) == 1 and word.isascii())
    return "desc-thin" if thin else None


def _format_name(item: RecordObject, index: int) -> str:
    return f"objects[{index}] {item.desc if len(item.desc) < 40 else item.desc[:36] + '...'!r}"


def _format_shape(item: RecordObject) -> str:
    numbers = [f"{value:g}" for value in item.coords[:8]]
    return f"{item.kind} [{', '.join(numbers)}{', ...' if len(item.coords) > 8 else ''}]"


def _format_size(extent: tuple[float, float]) -> str:
    return f"{extent[0]:g} x {extent[1]:g}"
