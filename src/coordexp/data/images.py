"""The one place that opens images: it reads their size, whether they can be decoded, and a content hash.

An image is named by its address (a str), or by the path of a file (a Path), in which `#` has no meaning.

A photo may be stored on its side, with EXIF data that say how to rotate it. Its size here is the one after
rotation, which is also what vision processors use. Needs Pillow, which is imported when the first file is read.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from coordexp.data.addresses import ImageError, open_address, tell_failures_apart
from coordexp.files import both_ends, open_file

if TYPE_CHECKING:
    from PIL import Image

# Pillow chooses a decoder by the content of a file, not by its name, and some decoders start other programs (EPS
# starts Ghostscript). Only these formats are ever tried.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
MOST_PIXELS = 2**27  # per image: a file of a few kilobytes can decode to gigabytes
MOST_RATIO = 200  # longer side to shorter side; the image processors of Qwen-VL refuse more
LARGEST_TILE = 2**20  # pixels; a tile of a TIFF may be larger than a small image
_ORIENTATION, _BITS, _PHOTOMETRIC, _TILE_WIDTH, _TILE_LENGTH = 0x0112, 258, 262, 322, 323
# Pillow raises these for tags with wrong values.
_BROKEN = (TypeError, KeyError, IndexError, OverflowError, struct.error)
_ENDS = 4096  # bytes from each end of a file that are hashed
UNREADABLE = "`coordexp data doctor` finds all such images, and `coordexp data clean` leaves their records out"

Source: TypeAlias = str | Path | IO[bytes]  # an address, the path of a file, or the bytes themselves


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The size of an image after rotation, and a hash of both ends of its file."""

    width: int
    height: int
    is_rotated: bool  # stored on its side
    content_hash: bytes  # files with different hashes differ; with the same hash they are almost surely the same


def size_problem(width: int, height: int) -> str | None:
    """Return why no model accepts an image of this size, or None. The doctor, training and the rollout server
    share this rule."""
    if problem := _pixel_problem(width, height):
        return problem
    if max(width, height) > MOST_RATIO * min(width, height):
        return f"{width} x {height}: the longer side is more than {MOST_RATIO} times the shorter one"
    return None


def _pixel_problem(width: int, height: int) -> str | None:
    too_many = width * height > MOST_PIXELS
    return f"{width} x {height} is more than {MOST_PIXELS} pixels" if too_many else None


@contextmanager
def open_image_file(source: Source) -> "Iterator[Image.Image]":
    """Open an image and read its header; its pixels are decoded when they are used. Raise ImageError if it is not
    a regular file, if the format is not in `FORMATS`, if there are too many pixels or pixels of an unknown range,
    or if the file is broken, even if that shows inside the block. Raise StoreError if its storage does not
    answer."""
    with _open_source(source) as file, _open_image(file) as image:
        yield image


@contextmanager
def _open_source(source: Source) -> Iterator[IO[bytes]]:
    """Open a source. Every error of the block that says something about the image becomes an ImageError."""
    from PIL import UnidentifiedImageError

    try:
        with tell_failures_apart(str(source)), _open_bytes(source) as file:
            yield file
    except FileNotFoundError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(f"not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} image") from error
    except (OSError, ValueError, SyntaxError, EOFError, *_BROKEN) as error:
        raise ImageError(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error


def _open_bytes(source: Source) -> AbstractContextManager[IO[bytes]]:
    if isinstance(source, str):
        return open_address(source)
    return open_file(source) if isinstance(source, Path) else nullcontext(source)


@contextmanager
def _open_image(file: IO[bytes]) -> "Iterator[Image.Image]":
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # our own limit applies: an error above it, and no warning below it
    with Image.open(file, formats=FORMATS) as image:
        if problem := _pixel_problem(*image.size):
            raise ImageError(problem)
        if image.format == "TIFF":
            _check_tiles(image)
        _check_mode(image)
        yield image


def _check_mode(image: "Image.Image") -> None:
    """Raise ImageError if pixels have no known range. Pillow also reads 12 bits, and 16 bits with white at zero,
    as 16 bits, without changing the numbers."""
    tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
    is_odd = image.mode.startswith("I;16") and (tags.get(_BITS) == (12,) or tags.get(_PHOTOMETRIC) == 0)
    if image.mode in ("I", "F") or is_odd:
        raise ImageError("its pixels are not 8 or 16 unsigned bits with black at 0; save it so")


def to_rgb(image: "Image.Image") -> "Image.Image":
    """Return the image with three channels of 8 bits. Pillow alone would clip 16 bits of grey at 255, so that
    nearly every pixel becomes white. Raise ImageError if the range of its pixels is unknown."""
    _check_mode(image)
    if image.mode.startswith("I;16"):
        from PIL import Image

        high_bytes = image.tobytes()[0 if image.mode == "I;16B" else 1 :: 2]
        image = Image.frombytes("L", image.size, high_bytes)
    return image.convert("RGB")


def _check_tiles(image: "Image.Image") -> None:
    """Raise ImageError if a tile of a TIFF is far larger than its image, because whole tiles are decoded."""
    tags = image.tag_v2  # type: ignore[attr-defined]
    width, height = tags.get(_TILE_WIDTH, 1), tags.get(_TILE_LENGTH, 1)
    if width * height > max(image.width * image.height, LARGEST_TILE):
        raise ImageError(
            f"its tiles of {width} x {height} are larger than the image, {image.width} x {image.height}"
        )


def upright_size(image: "Image.Image") -> tuple[int, int, bool]:
    """Return width and height after rotation by EXIF data, and whether the image is stored on its side. Decode
    nothing."""
    from PIL import Image

    width, height = image.size
    exif = Image.Image.getexif(image)  # the method of PNG files would decode all pixels
    is_rotated = (
        exif.get(_ORIENTATION, 1) in (5, 6, 7, 8) and image.format != "TIFF"
    )  # Pillow rotates a TIFF itself
    return (height, width, is_rotated) if is_rotated else (width, height, is_rotated)


def read_image_bytes(address: str) -> bytes:
    """Return the bytes behind the address of an image, which need not be one. Raise as `open_image_file` does."""
    with _open_source(address) as file:
        return file.read()


def read_image_size(source: Source) -> tuple[int, int]:
    facts = read_image_facts(source)
    return facts.width, facts.height


def read_image_facts(source: Source, *, decode: bool = False) -> ImageFacts:
    """Read the header of an image. Decode its pixels too if `decode` is set or the image seems to be cut off."""
    with _open_source(source) as file:
        content_hash, is_complete = _hash_ends(file)
        with _open_image(file) as image:
            width, height, is_rotated = upright_size(image)
            if decode or not is_complete:
                image.load()
    return ImageFacts(width, height, is_rotated, content_hash)


def _hash_ends(file: IO[bytes]) -> tuple[bytes, bool]:
    """Return a hash of the size and both ends of a file, and whether it ends like a complete JPEG or PNG."""
    head, tail, size = both_ends(file, _ENDS)
    content_hash = hashlib.blake2b(head + tail + size.to_bytes(8, "big"), digest_size=12).digest()
    return content_hash, tail.rstrip(b"\0").endswith((b"\xff\xd9", b"IEND\xaeB`\x82"))
