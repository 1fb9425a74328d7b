"""Every kind of problem that the doctor can find, and the checks of a single record. They are pure: facts about
the image file are passed in.

An error stops training, or would train on something that is not in the image. A warning is for a person to judge.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from coordexp.data.geometry import BINS, is_degenerate
from coordexp.data.images import ImageFacts, size_problem
from coordexp.data.records import Record, RecordObject
from coordexp.errors import Finding
from coordexp.files import is_encodable

# The problem and the fix, by code.
_ERRORS = {
    "no-records": ("the file has no records", "write one JSON object per line (see `coordexp data import`)"),
    "broken-line": (
        "line that is not a record",
        "correct or remove the line; one record is one JSON object on one line",
    ),
    "image-missing": (
        "image file that does not exist",
        "image paths are relative to the folder of the JSONL file; download the images, or remove their records",
    ),
    "image-unreadable": ("image that cannot be read", "replace the file or remove the record"),
    "size-mismatch": (
        "width and height differ from those of the image",
        "write the real size; if the image was resized, scale the coordinates with it",
    ),
    "image-size": ("image whose size no model accepts", "cut it into tiles, or remove the record"),
    "suspect-xywh": (
        "boxes look like x, y, width, height",
        "write x1, y1, x2, y2: add the width to x and the height to y",
    ),
    "suspect-centre": (
        "boxes look like centre x, centre y, width, height",
        "write x1, y1, x2, y2: the centre minus half the size, then the centre plus half the size",
    ),
    "suspect-swapped": (
        "x and y look swapped",
        "write x before y; if width and height of the record are swapped, exchange those instead",
    ),
    "suspect-space": (
        "coordinates are not in the space that the records state",
        "state the right `space`, or convert them",
    ),
    "inverted": ("box whose corners are inverted", "write the upper left corner before the lower right"),
    "outside": (
        "object that extends beyond the image by more than 1 %",
        "clip it to the image, or check size and space",
    ),
    "no-area": ("object without area", "remove it, or correct its coordinates"),
    "no-area-in-bins": (
        "object so small that it has no area in 1,000 bins",
        "remove it, or cut the image into tiles",
    ),
    "desc-broken": ("desc with half a character (a lone surrogate)", "write the text as UTF-8"),
    "too-long": (
        "answer with more tokens than --max-length",
        "raise the length, or give polygons fewer vertices, or cut the image into tiles",
    ),
}
_WARNINGS = {
    "maybe-space": (
        "coordinates would also fit another space than the records state",
        "look at some records with `coordexp data view`; state the right `space` if the shapes are misplaced",
    ),
    "over-the-edge": (
        "object that extends beyond the image by less than 1 %",
        "leave it, since training clips it; or clip it in the file",
    ),
    "duplicate-image": ("image that an earlier record uses", "put all objects of the image into one record"),
    "duplicate-content": (
        "image with the same content as an earlier one",
        "remove one of them, above all if they are in different splits",
    ),
    "duplicate-object": (
        "object that occurs twice",
        "remove one of the two: the model would learn to repeat objects",
    ),
    "desc-thin": ("desc that says next to nothing", "describe the object in a word or two"),
    "desc-spelling": ("classes that differ only in case or spaces", "use one spelling, or the model learns both"),
    "small-objects": (
        "the median side of the objects is under 20 bins",
        "rollout_matching.maskiou_resolution 256 is too coarse for them; 1000 is exact for boxes and costs about "
        "2.5 times as much",
    ),
}
KINDS = {code: Finding("error", code, *words) for code, words in _ERRORS.items()} | {
    code: Finding("warning", code, *words) for code, words in _WARNINGS.items()
}

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
