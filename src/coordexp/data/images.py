"""Image files, at the edge: their size as people see it, whether they can be read, and a mark of their content.

A photo may be stored on its side and say so in its EXIF data; its size is the one after turning, as vision
processors have it. Needs Pillow, which is imported when the first file is read.
"""

import hashlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

_ORIENTATION = 0x0112
_ENDS = 4096  # bytes from both ends of a file that make its mark


class ImageError(OSError):
    """A file that is not a readable image."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    width: int
    height: int
    turned: bool  # stored on its side
    mark: bytes  # two files of different marks differ; two of the same are almost surely the same


def image_size(path: Path) -> tuple[int, int]:
    facts = image_facts(path)
    return facts.width, facts.height


def image_facts(path: Path, *, decode: bool = False) -> ImageFacts:
    """From the head of the file. The pixels are decoded when asked for, or when the file seems cut off."""
    from PIL import Image

    mark, whole = _mark(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            with Image.open(path) as image:
                width, height = image.size
                exif = Image.Image.getexif(image)  # that of PNG files would decode all pixels
                turned = exif.get(_ORIENTATION, 1) in (5, 6, 7, 8)
                if decode or not whole:
                    image.load()
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            raise ImageError(str(error) or type(error).__name__) from error
    return ImageFacts(*((height, width) if turned else (width, height)), turned, mark)


def _mark(path: Path) -> tuple[bytes, bool]:
    """The mark of the content, and whether the file ends as a JPEG or a PNG does."""
    with path.open("rb") as file:
        head = file.read(_ENDS)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _ENDS))
        tail = file.read()
    mark = hashlib.blake2b(head + tail + size.to_bytes(8, "big"), digest_size=12).digest()
    return mark, tail.rstrip(b"\0").endswith((b"\xff\xd9", b"IEND\xaeB`\x82"))
