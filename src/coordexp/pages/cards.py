"""Cards of images with shapes drawn over them, as the pages of records, predictions and an evaluation show them.

Without JavaScript a page shows all cards. With it, cards can be filtered, images enlarged, and the arrow keys page
through them.
"""

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordexp.data import Record
from coordexp.data.geometry import box_ring
from coordexp.data.images import Source, open_image_file, to_rgb

if TYPE_CHECKING:
    from coordexp.evaluate import ImageAnswer

SIDE = 480  # pixels of a thumbnail
LOSSLESS_SIDE = 128  # up to this side a thumbnail is a PNG: such a small image is a drawing, or a test
MAX_HEIGHT = 400  # of an image on the page, so that an upright one does not take two rows
MAX_NAMES = 40  # drawn over an image; its list has all of them
Options = Sequence[tuple[str, str]]  # values and their words


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape with a tooltip, in pixels of its record: `ring` has x and y by turns. `data` are the attributes by
    which the script finds the shape, its name and its line in a list. `name` is written above the shape, or inside
    it at its bottom. A shape with a `hue` has the colour of its class, another one that of its
    `style`."""

    ring: Sequence[float]
    title: str
    name: str
    style: str = ""
    is_named_inside: bool = False
    data: Mapping[str, object] = field(default_factory=dict)
    hue: int | None = None

    @property
    def points(self) -> str:
        return " ".join(f"{x:.6g},{y:.6g}" for x, y in zip(self.ring[::2], self.ring[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class Drawing:
    """An image as a data URL, None if it cannot be shown, and shapes, of which the first `most_names` have their
    names. A small image is shown larger than it is, with sharp pixels."""

    width: int
    height: int
    url: str | None
    shapes: Sequence[Shape]
    most_names: int = MAX_NAMES

    @property
    def named(self) -> list[Shape]:
        return [shape for shape in self.shapes[: self.most_names] if shape.name]

    @property
    def max_width(self) -> int:
        return round(MAX_HEIGHT * self.width / self.height)

    @property
    def is_small(self) -> bool:
        return self.url is not None and self.url.startswith("data:image/png")

    def place_name(self, shape: Shape) -> str:
        """Return the style of a name. In the right half of the image, it ends where the shape ends."""
        left, right = (min(100.0, max(0.0, 100 * end(shape.ring[::2]) / self.width)) for end in (min, max))
        top, bottom = (min(96.0, max(4.0, 100 * end(shape.ring[1::2]) / self.height)) for end in (min, max))
        down = f"bottom:{100 - bottom:.2f}%" if shape.is_named_inside else f"top:max(0px, {top:.2f}% - 16px)"
        across = f"right:{100 - right:.2f}%" if left > 55 else f"left:{left:.2f}%"
        return f"{across};{down}" + ("" if shape.hue is None else f";--hue:{shape.hue}")


@dataclass(frozen=True, slots=True)
class Card:
    """`words` are the attributes that cards are filtered and ordered by. A fact is a name and a text, which may be
    empty; a problem a severity, a code and a detail; an object a shape, a name and a detail. `answer` is how a raw
    answer ended, and its text."""

    title: str
    detail: str
    words: Mapping[str, object]
    drawings: Sequence[Drawing] = ()
    remark: str = ""
    facts: Sequence[tuple[str, str]] = ()
    problems: Sequence[tuple[str, str, str]] = ()
    objects: Sequence[tuple[Shape, str, str]] = ()
    answer: tuple[str, str] | None = None


def number_classes(counts: Counter[str]) -> tuple[dict[str, int], Options]:
    """Return the numbers of classes, the most frequent first, and the options of a filter by class."""
    numbers = {desc: k for k, (desc, _) in enumerate(counts.most_common())}
    options = [(str(number), f"{desc} ({counts[desc]:,})") for desc, number in numbers.items()]
    return numbers, [("", "all classes"), *options]


def choose_hue(number: int) -> int:
    """Return hues that are far apart for neighbours in the list of classes."""
    return round(number * 137.5) % 360


def describe_request(record: Record) -> list[tuple[str, str]]:
    """Return what the record asks for as facts, if it has a request of its own."""
    parts = {
        "asks for": ", ".join(record.classes or ()),
        "asks for what is described as": record.expression or "",
        "prompt": record.prompt or "",
    }
    return [(name, text) for name, text in parts.items() if text]


def describe_answer(answer: "ImageAnswer") -> tuple[str, str] | None:
    """Return how an answer ended, and its text; None if it has none."""
    if not answer.was_asked or not answer.has_text:
        return None
    reasons = Counter(item.reason for item in answer.objects if item.reason is not None)
    refused = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
    ended = f"{answer.tokens:,} tokens, ended by {answer.finish_reason}"
    ended += f"; refused: {refused}" if refused else ""
    ended += f"; dropped as duplicates: {len(answer.dropped)}" if answer.dropped else ""
    return ended, answer.text


def ring_of(kind: str, coords: Sequence[float]) -> Sequence[float]:
    """Return the vertices of a polygon or of a box, x and y by turns."""
    return coords if kind == "poly" else box_ring(coords)


def make_thumbnail(source: Source, side: int = SIDE) -> str:
    """Return a data URL of the image with sides of at most `side` pixels. Raise OSError if it is broken."""
    from PIL import ImageOps  # imported late: the page of a file without images does not need Pillow

    with open_image_file(source) as file:
        file.draft("RGB", (2 * side, 2 * side))
        image = to_rgb(ImageOps.exif_transpose(file))
    image.thumbnail((side, side))
    kind = "PNG" if max(image.size) <= LOSSLESS_SIDE else "JPEG"
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=82)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def try_thumbnail(address: str, side: int = SIDE) -> tuple[str | None, str]:
    """Return the image as a data URL, or else why it is not shown."""
    try:
        return make_thumbnail(address, side), ""
    except (OSError, ValueError) as error:
        return None, explain_missing_image(error)


def explain_missing_image(error: OSError | ValueError) -> str:
    return f"image not shown: {getattr(error, 'strerror', None) or error}"
