"""An image file as a small picture inside the page. Needs Pillow, imported when the first one is made."""

import base64
import io
from pathlib import Path

from coordexp.data.images import opened_image

SIDE = 480  # pixels
PLAIN = 128  # up to this side a picture is kept without loss: it is a drawing, or a test


def thumbnail(path: Path, side: int = SIDE) -> str:
    """Return a data address of the image with sides of at most `side` pixels. Raise OSError if it is broken."""
    from PIL import ImageOps

    with opened_image(path) as image:
        image.draft("RGB", (2 * side, 2 * side))
        turned = ImageOps.exif_transpose(image).convert("RGB")
    turned.thumbnail((side, side))
    kind = "PNG" if max(turned.size) <= PLAIN else "JPEG"
    buffer = io.BytesIO()
    turned.save(buffer, kind, quality=82)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
