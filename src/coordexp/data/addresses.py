"""Where the bytes of an image are: its address, which is the key `image` of a record.

    images/7.png                              a file; a relative path begins at the folder of the data file
    shards/00012.tar#bytes=10752:48213        a part of a file: the offset of its first byte, and its size
    train.images.tsv#bytes=512:64000;base64   such a part, whose bytes are base64

A member of an uncompressed tar is one part of it, so WebDataset shards are used as they are. Only this form at the
end of an address names a part, so `a#b.png` is a file.

Two kinds of failure are never mixed. The image is broken (`ImageError`, or FileNotFoundError): it is missing, ends
before its address says, or cannot be decoded. That is a fact about the data, and stays. The store does not answer
(`StoreError`): that is a fact about the world, so it ends a command, and no record is ever dropped because of it.
"""

import base64
import errno
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from coordexp.errors import StoreError, UserError, explain
from coordexp.files import open_file

_PART = re.compile(r"#bytes=(\d+):(\d+)(;base64)?$", re.ASCII)
# What a file system says about a file, and Pillow about its content (None). Any other errno, such as EIO or
# ESTALE, says that the file system could not answer, or that this process has no more files or memory.
_ABOUT_THE_IMAGE = (
    None,
    errno.EACCES,
    errno.EINVAL,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENXIO,
    errno.EPERM,
)


class ImageError(UserError, OSError):
    """An address whose bytes are not a readable image. It is also an OSError, like the error for a missing
    file."""


@dataclass(frozen=True, slots=True)
class Address:
    """A file, or `size` bytes of it from `offset` on. `size` is None for the whole file."""

    file: str
    offset: int = 0
    size: int | None = None
    is_base64: bool = False


def parse_address(text: str) -> Address:
    if (part := _PART.search(text)) is None:
        return Address(text)
    return Address(text[: part.start()], int(part[1]), int(part[2]), part[3] is not None)


def join_address(folder: Path, image: str) -> str:
    """Return the address that an image has for this process. `folder` is the one of its data file."""
    return str(folder / image)


def move_address(image: str, folder: Path, to: Path) -> str:
    """Return the address in a record whose data file moves from one folder `to` another one."""
    if Path(image).is_absolute():
        return image
    file = folder / image
    return Path(os.path.relpath(file.parent.resolve() / file.name, to.resolve())).as_posix()


def is_file(image: str) -> bool:
    """Return True if an address is that of a whole file, which other programs can open."""
    return parse_address(image).size is None


def open_address(text: str) -> IO[bytes]:
    """Open the bytes behind an address. Raise ImageError if the file ends before them, and OSError as `open_file`
    does."""
    address = parse_address(text)
    file = open_file(Path(address.file))
    if address.size is None:
        return file
    with file:
        length = os.fstat(file.fileno()).st_size
        check_end(address.offset + address.size, length)
        file.seek(address.offset)
        content = file.read(address.size)
    check_end(address.size, len(content))
    return io.BytesIO(decode_base64(content) if address.is_base64 else content)


def check_end(end: int, length: int) -> None:
    """Raise ImageError if bytes up to `end` are asked for, and there are only `length`."""
    if length < end:
        raise ImageError(f"its address needs {end:,} bytes, and there are {length:,}")


def decode_base64(content: bytes) -> bytes:
    with explain(ValueError, "not base64", to=ImageError):
        return base64.b64decode(content, validate=True)


@contextmanager
def tell_failures_apart(name: str) -> Iterator[None]:
    """Raise a StoreError in place of an OSError that says nothing about the image, such as an input/output error.
    Other errors pass. `name` is what is read."""
    try:
        yield
    except OSError as error:
        if error.errno in _ABOUT_THE_IMAGE:
            raise
        raise StoreError(
            f"{name}: the file system did not answer: {error.strerror or error}",
            "check the disk or the mount; nothing was recorded about this image, so the command can be repeated",
        ) from error
