"""An image file as a small picture inside the page. Needs Pillow, imported when the first one is made."""

import base64
import io
import warnings
from pathlib import Path

SIDE = 480  # pixels
PLAIN = 128  # up to this side a picture is kept without loss: it is a drawing, or a test


def thumbnail(path: Path, side: int = SIDE) -> str:
    """A data address of a picture with sides of at most `side` pixels. OSError when the file cannot be read."""
    from PIL import Image, ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            with Image.open(path) as image:
                image.draft("RGB", (2 * side, 2 * side))
                turned = ImageOps.exif_transpose(image).convert("RGB")
        except (ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            raise OSError(str(error)) from error
    turned.thumbnail((side, side))
    kind = "PNG" if max(turned.size) <= PLAIN else "JPEG"
    buffer = io.BytesIO()
    turned.save(buffer, kind, quality=82)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
