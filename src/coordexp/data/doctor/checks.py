"""Every kind of problem that the doctor can find, the checks of a single record, and those of many records. They
are pure: facts about the image file are passed in.

An error stops training, or would train on something that is not in the image. A warning is for a person to judge.

Some mistakes only many records together reveal: boxes as x, y, width, height; x and y swapped; a wrong space. Each
of these checks needs two observations: some of the shapes are impossible as they are written, and nearly all of
them are possible under another reading. Either observation alone proves nothing. `add` counts, `merge` adds the
counts of another part of the file, and `problems` concludes.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from coordexp.data.geometry import BINS, is_degenerate
from coordexp.data.images import ImageFacts, size_problem
from coordexp.data.records import SPACES, AnyRecord, ChatRecord, Record, RecordObject, Space
from coordexp.data.requests import ORDER_WORDS, VISIBLE_ORDERS, bounds
from coordexp.errors import Finding
from coordexp.families import PLACE_TOKENS
from coordexp.files import is_encodable

# The problem and the fix, by code.
_ERRORS = {
    "no-records": ("the file has no records", "write one JSON object per line (see `coordexp data import`)"),
    "broken-line": (
        "line that is not a record",
        "correct or remove the line; one record is one JSON object on one line, with keys of your own in `meta`",
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
    "text-broken": (
        "question, answer or request with half a character (a lone surrogate)",
        "write the text as UTF-8",
    ),
    "special-token": (
        "question, answer or request with a token that is not text for the model, such as <|im_end|>",
        "remove the token; these are plain text, and may have coordinate tokens",
    ),
    "too-long": (
        "example with more tokens than are allowed",
        "raise global_max_length of the config, or lower model.max_pixels, give polygons fewer vertices, or cut "
        "the image into tiles",
    ),
    "not-writable": (
        "object that the format of answers cannot express",
        "set custom.answer_format: coord_tokens, or give the record bbox_2d in place of poly",
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
    "duplicate-image": (
        "image that an earlier record uses, with the same request",
        "put all objects of the image into one record",
    ),
    "duplicate-content": (
        "image with the same content as an earlier one",
        "remove one of them, above all if they are in different splits",
    ),
    "duplicate-object": (
        "object that occurs twice",
        "remove one of the two: the model would learn to repeat objects",
    ),
    "desc-thin": ("desc that says next to nothing", "describe the object in a word or two"),
    "mixed-shapes": (
        "class with boxes and with polygons",
        "give all objects of a class the same kind of shape (import with --geometry box or poly), or the model "
        "has to guess which one to write",
    ),
    "desc-spelling": ("classes that differ only in case or spaces", "use one spelling, or the model learns both"),
    "no-order": (
        "labels are in no order that can be seen in the images",
        "set custom.object_order: reading, as the shipped configs do; with file, a model cannot learn what comes "
        "next, and missed objects have no place of their own",
    ),
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
_SPECIAL = re.compile(r"<\|[a-z_]+\|>")  # as all families write the tokens that end a turn or stand for an image
THIN = frozenset({"n/a", "na", "nan", "none", "null", "undefined", "unknown", "todo", "unlabeled", "unlabelled"})


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in one place. `code` is a key of `KINDS`, `detail` names the place and the values, and
    `index` is the number of the object that has the problem, if it is one object."""

    code: str
    detail: str
    index: int | None = None


def check_record(record: AnyRecord) -> tuple[Problem, ...]:
    """Return the problems of a record. `true_objects` succeeds for a record without an error among them."""
    problems: list[Problem] = []
    if record.image is not None and (unusable := size_problem(record.width, record.height)):
        problems.append(Problem("image-size", f"{record.image!r}: {unusable}"))
    if isinstance(record, ChatRecord):
        for name in ("question", "answer"):
            problems += _check_text(name, getattr(record, name))
        return tuple(problems)
    for name in ("prompt", "expression"):
        problems += _check_text(name, getattr(record, name) or "")
    for k, desc in enumerate(record.classes or ()):
        problems += _check_text(f"classes[{k}]", desc)
    seen: dict[tuple[object, ...], int] = {}
    for index, item in enumerate(record.objects):
        bins = record.in_bins(item)
        problems += _check_shape(record, item, bins, index)
        if code := _desc_problem(item.desc):
            problems.append(Problem(code, _format_name(item, index), index))
        earlier = seen.setdefault((item.desc, item.kind, bins), index)
        if earlier != index:
            detail = f"{_format_name(item, index)} repeats objects[{earlier}]"
            problems.append(Problem("duplicate-object", detail, index))
    return tuple(problems)


def _check_text(name: str, text: str) -> Iterator[Problem]:
    """Yield the problems of a text that becomes a part of a conversation."""
    if not is_encodable(text):
        yield Problem("text-broken", name)
    if special := next((token for token in _SPECIAL.findall(text) if not token.startswith(PLACE_TOKENS)), None):
        yield Problem("special-token", f"{name} has {special}")


def check_image(record: AnyRecord, facts: ImageFacts) -> tuple[Problem, ...]:
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
        yield Problem("inverted", shown, index)
    if excess > FAR:
        yield Problem("outside", f"{shown} in {_format_size(extent)}", index)
    elif excess > HALF_A_BIN:
        yield Problem("over-the-edge", f"{shown} in {_format_size(extent)}", index)
    if inverted:
        return
    if flat:
        yield Problem("no-area", shown, index)
    elif excess <= FAR and is_degenerate(item.kind, bins):
        yield Problem("no-area-in-bins", f"{shown} in {_format_size(extent)}", index)


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


SLACK = 1.005  # times the extent, so that shapes may touch the border
NEIGHBOURS = 1000  # pairs of labels that are needed to judge the order
ORDERED = 0.7  # share of them that follow each other in an order, from which it is one. By accident, half do
FITS = 0.99  # share of shapes that must be possible under the other reading
BREAKS = 0.05  # share of shapes that must be impossible as written
FEW = 3  # impossible shapes that are needed at least


class Suspicions:
    """Counts about many records, and the mistakes that only they reveal together."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()  # of boxes and shapes by what was observed, and of records by space
        self._fits: Counter[tuple[Space, Space]] = Counter()  # records that state the first and fit the second
        self._reach: dict[tuple[Space, Space], list[float]] = {}  # how far the shapes of these records go in it

    def add(self, record: Record) -> None:
        if record.objects:
            self._add_boxes(record)
            self._add_axes(record)
            self._add_space(record)
            self._add_order(record)

    def merge(self, other: "Suspicions") -> None:
        self._counts.update(other._counts)
        self._fits.update(other._fits)
        for spaces, reach in other._reach.items():
            self._reach[spaces] = [*map(max, reach, self._reach.get(spaces, reach))]

    def problems(self) -> Iterator[Problem]:
        swapped = list(self._axes_problems())
        yield from swapped
        yield from self._box_problems()
        for space in SPACES:
            # Swapped axes make shapes exceed the image too, and are the better explanation.
            if self._counts[space] >= 5 and not (swapped and space == "pixel"):
                yield from self._space_problems(space)
        yield from self._order_problems()

    def _add_boxes(self, record: Record) -> None:
        """Count how many boxes are possible as two corners, as corner and size, or as centre and size."""
        extent, counts = record.extent, self._counts
        width, height = (side * SLACK for side in extent)
        left, top = extent[0] - width, extent[1] - height
        for item in record.objects:
            if item.kind == "bbox_2d":
                a, b, c, d = item.coords
                has_size = c > 0 and d > 0
                starts = a - c / 2 >= left and b - d / 2 >= top
                counts["boxes"] += 1
                counts["inverted"] += c < a or d < b
                counts["size"] += has_size and a >= 0 and b >= 0 and a + c <= width and b + d <= height
                counts["centre"] += has_size and starts and a + c / 2 <= width and b + d / 2 <= height

    def _box_problems(self) -> Iterator[Problem]:
        boxes, inverted = self._counts["boxes"], self._counts["inverted"]
        if boxes < 10 or inverted < max(FEW, BREAKS * boxes):
            return
        for code, name in (("suspect-xywh", "size"), ("suspect-centre", "centre")):
            if (fit := self._counts[name]) >= FITS * boxes:
                yield Problem(code, f"{inverted} of {boxes} boxes are inverted; read this way, {fit} are valid")
                return

    def _add_axes(self, record: Record) -> None:
        """Count the shapes in images that are not square, and those that fit when x and y are exchanged."""
        width, height = record.extent
        if record.space != "pixel" or max(width, height) < 1.1 * min(width, height):
            return
        for item in record.objects:
            x, y = max(item.coords[::2]), max(item.coords[1::2])
            self._counts["shapes"] += 1
            self._counts["outside"] += x > width * SLACK or y > height * SLACK
            self._counts["swapped"] += x <= height * SLACK and y <= width * SLACK

    def _axes_problems(self) -> Iterator[Problem]:
        shapes, outside, swapped = (self._counts[name] for name in ("shapes", "outside", "swapped"))
        if shapes >= 10 and outside >= max(FEW, BREAKS * shapes) and swapped >= FITS * shapes:
            yield Problem(
                "suspect-swapped", f"{outside} of {shapes} objects exceed their images; swapped, {swapped} fit"
            )

    def _add_space(self, record: Record) -> None:
        """Count which spaces a record fits, and note how far it reaches in each of them."""
        x = max(max(item.coords[::2]) for item in record.objects)
        y = max(max(item.coords[1::2]) for item in record.objects)
        self._counts[record.space] += 1
        for space in SPACES:
            width, height = record.extent_in(space)
            self._fits[record.space, space] += x <= width * SLACK and y <= height * SLACK
            reach = self._reach.setdefault((record.space, space), [0.0, 0.0])
            reach[:] = max(reach[0], x / width), max(reach[1], y / height)

    def _add_order(self, record: Record) -> None:
        """Count how many labels follow the one before them in each order."""
        boxes = [bounds(item.coords) for item in record.objects]
        self._counts["neighbours"] += len(boxes) - 1
        for order, sort_key in VISIBLE_ORDERS.items():
            keys = list(map(sort_key, boxes))
            self._counts[order] += sum(before <= after for before, after in pairwise(keys))

    def _order_problems(self) -> Iterator[Problem]:
        neighbours = self._counts["neighbours"]
        if neighbours < NEIGHBOURS:
            return
        shares = {order: self._counts[order] / neighbours for order in VISIBLE_ORDERS}
        if max(shares.values()) < ORDERED:
            words = ", ".join(f"{share:.0%} go {ORDER_WORDS[order]}" for order, share in shares.items())
            yield Problem("no-order", f"of {neighbours:,} pairs of neighbours in the lists, {words}")

    def _space_problems(self, stated: Space) -> Iterator[Problem]:
        records, alike = self._counts[stated], ("norm1000", "bin")  # which no data can tell apart
        others = [space for space in SPACES if space != stated and not (space in alike and stated in alike)]
        fitting = [space for space in others if self._fits[stated, space] >= FITS * records]
        if not fitting:
            return
        best = max(fitting, key=lambda space: min(self._reach[stated, space]))
        name = "norm1000 or bin" if best in alike else best
        breaks, reach = records - self._fits[stated, stated], self._reach[stated, stated]
        if breaks >= max(FEW, 0.2 * records):
            fit = self._fits[stated, best]
            detail = f"stated {stated}: {breaks} of {records} records exceed it; as {name}, {fit} fit"
            yield Problem("suspect-space", detail)
        elif best == "unit":
            yield Problem("suspect-space", f"stated {stated}: no coordinate is above 1; they look like unit")
        elif records >= 30 and min(self._reach[stated, best]) >= 0.9 and min(reach) <= 0.9:
            # No shape reaches the far part of the stated space, and the other one is used to its edges.
            yield Problem(
                "maybe-space",
                f"stated {stated}: the objects of {records} records never go beyond "
                f"{' x '.join(f'{share:.0%}' for share in reach)} of it, and just fill {name}",
            )
