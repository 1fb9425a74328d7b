"""Images on a page: thumbnails as data URLs, with shapes and names drawn over them."""

import base64
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from coordexp.data import AnyRecord, Record
from coordexp.data.images import open_image_file, to_rgb
from coordexp.pages.document import escape_text

SIDE = 480  # pixels of a thumbnail
LOSSLESS_SIDE = 128  # up to this side a thumbnail is a PNG: such a small image is a drawing, or a test
NamePlace = Literal["above", "top", "bottom"]
MAX_HEIGHT = 400  # of an image on the page, so that an upright one does not take two rows


def make_thumbnail(path: Path, side: int = SIDE) -> str:
    """Return a data URL of the image with sides of at most `side` pixels. Raise OSError if it is broken."""
    from PIL import ImageOps  # imported late: the page of a file without images does not need Pillow

    with open_image_file(path) as file:
        file.draft("RGB", (2 * side, 2 * side))
        image = to_rgb(ImageOps.exif_transpose(file))
    image.thumbnail((side, side))
    kind = "PNG" if max(image.size) <= LOSSLESS_SIDE else "JPEG"
    buffer = io.BytesIO()
    image.save(buffer, kind, quality=82)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def explain_missing_image(error: OSError | ValueError) -> str:
    return f"image not shown: {getattr(error, 'strerror', None) or error}"


def render_stage(record: AnyRecord, url: str | None, shapes: Iterable[str], names: Iterable[str]) -> str:
    """Return an image with SVG shapes stretched over it, in the pixels of its record, and names. A small image is
    shown larger than it is, with sharp pixels. The script enlarges any image on a click."""
    small = ' class="small"' if url and url.startswith("data:image/png") else ""
    image = f'<img alt=""{small} src="{url}">' if url else '<span class="blank">no image</span>'
    width = round(MAX_HEIGHT * record.width / record.height)
    return (
        f'<div class="stage" style="aspect-ratio:{record.width}/{record.height};max-width:{width}px">{image}'
        f'<svg viewBox="0 0 {record.width} {record.height}" preserveAspectRatio="none">{"".join(shapes)}</svg>'
        f"{''.join(names)}</div>"
    )


def render_name(
    record: Record, text: str, box: Sequence[float], attributes: str, place: NamePlace, style: str = ""
) -> str:
    """Return the name of a shape: above it, or inside its box, at the top or at the bottom. In the right half of
    the image, it ends where the shape ends."""
    left, right = (min(100.0, max(0.0, 100 * x / record.width)) for x in box[::2])
    top, bottom = (100 * y / record.height for y in box[1::2])
    top, bottom = min(96.0, max(0.0, top)), min(100.0, max(4.0, bottom))
    across = f"right:{100 - right:.2f}%" if left > 55 else f"left:{left:.2f}%"
    down = {
        "above": f"top:max(0px, {top:.2f}% - 16px)",
        "top": f"top:{top:.2f}%",
        "bottom": f"bottom:{100 - bottom:.2f}%",
    }[place]
    return f'<span {attributes} style="{across};{down};{style}">{escape_text(text)}</span>'


def format_points(coords: tuple[float, ...]) -> str:
    """Return the points of a polygon as SVG has them."""
    return " ".join(f"{x:.6g},{y:.6g}" for x, y in zip(coords[::2], coords[1::2], strict=True))


def choose_hue(number: int) -> int:
    """Return hues that are far apart for neighbours in the list of classes."""
    return round(number * 137.5) % 360
