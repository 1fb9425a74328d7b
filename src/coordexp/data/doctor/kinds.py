"""Everything the doctor can find, with what to do about it.

An error stops training, or trains on something that is not in the picture. A warning is for a person to judge.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Kind:
    severity: Severity
    problem: str
    fix: str


@dataclass(frozen=True, slots=True)
class Example:
    """`line` is None for what only the whole file shows."""

    line: int | None
    detail: str


@dataclass(frozen=True, slots=True)
class Finding:
    code: str
    count: int
    examples: tuple[Example, ...]

    @property
    def kind(self) -> Kind:
        return KINDS[self.code]


KINDS: dict[str, Kind] = {
    "no-records": Kind(
        "error", "the file has no records", "write one JSON object a line (see `coordexp data import`)"
    ),
    "broken-line": Kind(
        "error",
        "line that is not a record",
        "correct or remove the line; one record is one JSON object on one line",
    ),
    "image-missing": Kind(
        "error",
        "image that is not there",
        "image paths are relative to the folder of the JSONL file; fetch the images, or remove their records",
    ),
    "image-unreadable": Kind("error", "image that cannot be read", "replace the file or remove the record"),
    "size-mismatch": Kind(
        "error",
        "width and height are not those of the image",
        "write the real size; if the image was resized, scale the coordinates with it",
    ),
    "image-size": Kind(
        "error", "image that no model can be given, by its size", "cut it into tiles, or remove the record"
    ),
    "suspect-xywh": Kind(
        "error",
        "boxes look like x, y, width, height",
        "write x1, y1, x2, y2: add the width to x and the height to y",
    ),
    "suspect-centre": Kind(
        "error",
        "boxes look like centre x, centre y, width, height",
        "write x1, y1, x2, y2: the centre less and plus half the size",
    ),
    "suspect-swapped": Kind(
        "error",
        "x and y look swapped",
        "write x before y; if width and height of the record are swapped, write those right",
    ),
    "suspect-space": Kind(
        "error",
        "coordinates are not in the space that the records state",
        "state the right `space`, or convert them",
    ),
    "inverted": Kind(
        "error", "box whose corners are inverted", "write the upper left corner before the lower right"
    ),
    "outside": Kind(
        "error", "object that leaves the image by more than 1 %", "clip it to the image, or check size and space"
    ),
    "no-area": Kind("error", "object without area", "remove it, or correct its coordinates"),
    "no-area-in-bins": Kind(
        "error", "object so small that it has no area in 1,000 bins", "remove it, or cut the image into tiles"
    ),
    "desc-broken": Kind("error", "desc with half a character (a lone surrogate)", "write the text as UTF-8"),
    "too-long": Kind(
        "error",
        "answer of more tokens than --max-length",
        "raise the length, or give polygons fewer vertices, or cut the image into tiles",
    ),
    "maybe-space": Kind(
        "warning",
        "coordinates stay within another space than the records state",
        "look at some with `coordexp data view`; state the right `space` if they are wrong",
    ),
    "over-the-edge": Kind(
        "warning", "object that leaves the image by less than 1 %", "nothing: training clips it; or clip it here"
    ),
    "duplicate-image": Kind("warning", "image that an earlier record has", "join the objects in one record"),
    "duplicate-content": Kind(
        "warning", "image with the content of an earlier one", "remove one, above all if splits share it"
    ),
    "duplicate-object": Kind(
        "warning", "object that is there twice", "remove one: the model would learn to repeat"
    ),
    "desc-thin": Kind("warning", "desc that says next to nothing", "describe the object in a word or two"),
    "desc-spelling": Kind(
        "warning",
        "classes that differ in case or spaces only",
        "spell them in one way, or the model learns both",
    ),
    "small-objects": Kind(
        "warning",
        "the median side of the objects is under 20 bins",
        "rollout_matching.maskiou_resolution 256 is too coarse for them; 1000 is exact for boxes and costs about "
        "2.5 times as much",
    ),
}
