"""Image files, at the edge: the one place that opens them, their size as people see it, whether they can be read,
and a mark of their content.

A photo may be stored on its side and say so in its EXIF data; its size is the one after turning, as vision
processors have it. Needs Pillow, which is imported when the first file is read.
"""

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from coordexp.errors import UserError
from coordexp.files import both_ends

if TYPE_CHECKING:
    from PIL import Image

# Pillow goes by the content of a file, not by its name, and knows formats that start other programs (EPS starts
# Ghostscript). Only these are ever tried.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
MOST_PIXELS = 2**27  # of an image: a file of some kilobytes can be gigabytes of pixels
MOST_RATIO = 200  # of the longer side to the shorter one; the image processors of Qwen-VL refuse more
LARGEST_TILE = 2**20  # pixels of a tile of a TIFF, which may be larger than a small image
_ORIENTATION, _TILE_WIDTH, _TILE_LENGTH = 0x0112, 322, 323
_BROKEN = (TypeError, KeyError, IndexError, OverflowError, struct.error)  # of Pillow, for tags with wrong values
_ENDS = 4096  # bytes from both ends of a file that make its mark


class ImageError(UserError, OSError):
    """A file that is not a readable image."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    width: int
    height: int
    turned: bool  # stored on its side
    mark: bytes  # two files of different marks differ; two of the same are almost surely the same


def size_problem(width: int, height: int) -> str | None:
    """Return why no model can be given an image of this size, or None. The doctor, training and the rollout server
    all ask here."""
    if problem := _pixel_problem(width, height):
        return problem
    if max(width, height) > MOST_RATIO * min(width, height):
        return f"{width} x {height}: the longer side is more than {MOST_RATIO} times the shorter one"
    return None


def _pixel_problem(width: int, height: int) -> str | None:
    too_many = width * height > MOST_PIXELS
    return f"{width} x {height} are more than {MOST_PIXELS} pixels" if too_many else None


@contextmanager
def opened_image(source: Path | IO[bytes]) -> "Iterator[Image.Image]":
    """Open an image by its header; its pixels are decoded when they are used. Raise ImageError if the content is
    of another format than `FORMATS`, has too many pixels or is broken, also when that shows inside the block."""
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # ours is the limit here: an error, and no warning below it
    try:
        with Image.open(source, formats=FORMATS) as image:
            if problem := _pixel_problem(*image.size):
                raise ImageError(problem)
            if image.format == "TIFF":
                _check_tiles(image)
            yield image
    except FileNotFoundError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(f"not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image") from error
    except (OSError, ValueError, SyntaxError, EOFError, *_BROKEN) as error:
        raise ImageError(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error


def _check_tiles(image: "Image.Image") -> None:
    """Raise ImageError if a tile of a TIFF is far larger than its image: whole tiles are decoded."""
    tags = image.tag_v2  # type: ignore[attr-defined]
    width, height = tags.get(_TILE_WIDTH, 1), tags.get(_TILE_LENGTH, 1)
    if width * height > max(image.width * image.height, LARGEST_TILE):
        raise ImageError(
            f"its tiles of {width} x {height} are larger than the image, {image.width} x {image.height}"
        )


def upright_size(image: "Image.Image") -> tuple[int, int, bool]:
    """Return width and height after turning by EXIF data, and whether it is stored on its side, undecoded."""
    from PIL import Image

    width, height = image.size
    exif = Image.Image.getexif(image)  # that of PNG files would decode all pixels
    turned = exif.get(_ORIENTATION, 1) in (5, 6, 7, 8) and image.format != "TIFF"  # Pillow turns a TIFF itself
    return (height, width, turned) if turned else (width, height, turned)


def image_size(path: Path) -> tuple[int, int]:
    facts = image_facts(path)
    return facts.width, facts.height


def image_facts(path: Path, *, decode: bool = False) -> ImageFacts:
    """From the head of the file. The pixels are decoded when asked for, or when the file seems cut off."""
    mark, whole = _mark(path)
    with opened_image(path) as image:
        width, height, turned = upright_size(image)
        if decode or not whole:
            image.load()
    return ImageFacts(width, height, turned, mark)


def _mark(path: Path) -> tuple[bytes, bool]:
    """The mark of the content, and whether the file ends as a JPEG or a PNG does."""
    head, tail, size = both_ends(path, _ENDS)
    mark = hashlib.blake2b(head + tail + size.to_bytes(8, "big"), digest_size=12).digest()
    return mark, tail.rstrip(b"\0").endswith((b"\xff\xd9", b"IEND\xaeB`\x82"))
