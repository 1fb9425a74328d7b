"""Every kind of problem that the doctor can find, with what to do about it.

An error stops training, or would train on something that is not in the image. A warning is for a person to judge.
"""

from dataclasses import dataclass

from coordexp.errors import Severity


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """The severity of a problem, what it is, and what to do about it."""

    severity: Severity
    problem: str
    fix: str


KINDS: dict[str, ProblemKind] = {
    "no-records": ProblemKind(
        "error", "the file has no records", "write one JSON object per line (see `coordexp data import`)"
    ),
    "broken-line": ProblemKind(
        "error",
        "line that is not a record",
        "correct or remove the line; one record is one JSON object on one line",
    ),
    "image-missing": ProblemKind(
        "error",
        "image file that does not exist",
        "image paths are relative to the folder of the JSONL file; download the images, or remove their records",
    ),
    "image-unreadable": ProblemKind("error", "image that cannot be read", "replace the file or remove the record"),
    "size-mismatch": ProblemKind(
        "error",
        "width and height differ from those of the image",
        "write the real size; if the image was resized, scale the coordinates with it",
    ),
    "image-size": ProblemKind(
        "error", "image whose size no model accepts", "cut it into tiles, or remove the record"
    ),
    "suspect-xywh": ProblemKind(
        "error",
        "boxes look like x, y, width, height",
        "write x1, y1, x2, y2: add the width to x and the height to y",
    ),
    "suspect-centre": ProblemKind(
        "error",
        "boxes look like centre x, centre y, width, height",
        "write x1, y1, x2, y2: the centre minus half the size, then the centre plus half the size",
    ),
    "suspect-swapped": ProblemKind(
        "error",
        "x and y look swapped",
        "write x before y; if width and height of the record are swapped, exchange those instead",
    ),
    "suspect-space": ProblemKind(
        "error",
        "coordinates are not in the space that the records state",
        "state the right `space`, or convert them",
    ),
    "inverted": ProblemKind(
        "error", "box whose corners are inverted", "write the upper left corner before the lower right"
    ),
    "outside": ProblemKind(
        "error",
        "object that extends beyond the image by more than 1 %",
        "clip it to the image, or check size and space",
    ),
    "no-area": ProblemKind("error", "object without area", "remove it, or correct its coordinates"),
    "no-area-in-bins": ProblemKind(
        "error", "object so small that it has no area in 1,000 bins", "remove it, or cut the image into tiles"
    ),
    "desc-broken": ProblemKind(
        "error", "desc with half a character (a lone surrogate)", "write the text as UTF-8"
    ),
    "too-long": ProblemKind(
        "error",
        "answer with more tokens than --max-length",
        "raise the length, or give polygons fewer vertices, or cut the image into tiles",
    ),
    "maybe-space": ProblemKind(
        "warning",
        "coordinates would also fit another space than the records state",
        "look at some records with `coordexp data view`; state the right `space` if the shapes are misplaced",
    ),
    "over-the-edge": ProblemKind(
        "warning",
        "object that extends beyond the image by less than 1 %",
        "leave it, since training clips it; or clip it in the file",
    ),
    "duplicate-image": ProblemKind(
        "warning", "image that an earlier record uses", "put all objects of the image into one record"
    ),
    "duplicate-content": ProblemKind(
        "warning",
        "image with the same content as an earlier one",
        "remove one of them, above all if they are in different splits",
    ),
    "duplicate-object": ProblemKind(
        "warning", "object that occurs twice", "remove one of the two: the model would learn to repeat objects"
    ),
    "desc-thin": ProblemKind("warning", "desc that says next to nothing", "describe the object in a word or two"),
    "desc-spelling": ProblemKind(
        "warning",
        "classes that differ only in case or spaces",
        "use one spelling, or the model learns both",
    ),
    "small-objects": ProblemKind(
        "warning",
        "the median side of the objects is under 20 bins",
        "rollout_matching.maskiou_resolution 256 is too coarse for them; 1000 is exact for boxes and costs about "
        "2.5 times as much",
    ),
}
