"""Where the bytes of an image are: its address, which is the key `image` of a record.

    images/7.png                              a file; a relative path begins at the folder of the data file
    shards/00012.tar#bytes=10752:48213        a part of a file: the offset of its first byte, and its size
    train.images.tsv#bytes=512:64000;base64   such a part, whose bytes are base64
    s3://bucket/00012.tar#bytes=10752:48213   an object in a store (`coordexp.data.stores`), or a part of it

A member of an uncompressed tar is one part of it, so WebDataset shards are used as they are. Only this form at the
end of an address names a part, so `a#b.png` is a file. An address is text: a path would make `s3:/` of `s3://`.

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
from urllib.parse import unquote

from coordexp.errors import StoreError, UserError, explain
from coordexp.files import open_file

SCHEMES = ("s3", "gs", "hf", "https", "http")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?")
_PATH = re.compile(r"[^?#\s\\]*")
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
    """A file or a URL, or `size` bytes of it from `offset` on. `size` is None for the whole."""

    location: str
    offset: int = 0
    size: int | None = None
    is_base64: bool = False

    @property
    def is_url(self) -> bool:
        return is_url(self.location)


def parse_address(text: str) -> Address:
    """Return the parts of an address. Raise ImageError if it is a URL that no store may have."""
    part = _PART.search(text)
    location = text if part is None else text[: part.start()]
    if is_url(text):
        if problem := find_url_problem(text):
            raise ImageError(problem)
        scheme, host, path = _split_url(location)
        location = f"{scheme.lower()}://{host.lower()}/{path}"
    return (
        Address(location) if part is None else Address(location, int(part[1]), int(part[2]), part[3] is not None)
    )


def is_url(text: str) -> bool:
    return _SCHEME.match(text) is not None


def find_url_problem(text: str) -> str | None:
    """Return what is wrong with an address that is a URL, or None. Nothing of it is repeated, because it may have
    a password in it: addresses are in checkpoints, logs and pages."""
    if not is_url(text):
        return None
    scheme, host, path = _split_url(_PART.sub("", text))
    if scheme.lower() not in SCHEMES:
        return (
            f"its URL has the scheme {scheme}; stores have {', '.join(SCHEMES)}, and a file is named by its path"
        )
    if "@" in host:
        return "its URL contains a name or a password"
    if not _HOST.fullmatch(host):
        return "its URL has no valid name of a host or bucket"
    if not path.isprintable() or not _PATH.fullmatch(path):
        return "its URL has a query, a blank, a backslash or a fragment other than #bytes=OFFSET:SIZE"
    parts = unquote(unquote(path)).replace("\\", "/").split("/")
    return "its URL has a step such as .." if {".", ".."}.intersection(parts) else None


def _split_url(text: str) -> tuple[str, str, str]:
    """Return the scheme, the host or bucket, and the path without its first slash. `urllib` would drop characters
    that other programs do not drop."""
    scheme, _, rest = text.partition("://")
    host, _, path = rest.partition("/")
    return scheme, host, path


def join_address(folder: Path, image: str) -> str:
    """Return the address that an image has for this process. `folder` is the one of its data file."""
    return image if is_url(image) else str(folder / image)


def move_address(image: str, folder: Path, to: Path) -> str:
    """Return the address in a record whose data file moves from one folder `to` another one."""
    if is_url(image) or Path(image).is_absolute():
        return image
    file = folder / image
    return Path(os.path.relpath(file.parent.resolve() / file.name, to.resolve())).as_posix()


def is_file(image: str) -> bool:
    """Return True if an address is that of a whole file, which other programs can open."""
    return not is_url(image) and _PART.search(image) is None


def open_address(text: str) -> IO[bytes]:
    """Open the bytes behind an address. Raise ImageError if the file or object ends before them, OSError as
    `open_file` does, and StoreError if a store does not answer."""
    address = parse_address(text)
    if address.is_url:
        from coordexp.data import stores  # which need this module

        content = stores.read(address)
        return io.BytesIO(decode_base64(content) if address.is_base64 else content)
    file = open_file(Path(address.location))
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
