"""Files that survive a crash or a full disk: written whole or not at all, or grown by whole lines.

Imports nothing heavy, so that every package can write its files this way.
"""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from coordexp.errors import DataError, UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # file systems that cannot sync a folder
_BLOCK = 1 << 16
_appending = threading.Lock()  # a failed append cuts its half line off again, and must not cut another one's


class WriteError(UserError, OSError):
    """A file that could not be written. The message has the path, the reason and a way out."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a crash at any moment leaves either the old content or the new one.

    The content goes to a partial file in the same folder, is synced, renamed, and the folder is synced. The mode
    follows the umask. Something that is not a regular file, such as a pipe, is written to directly."""
    data = content.encode() if isinstance(content, str) else content
    with _as_write_error(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        target = path.resolve()  # of a link, the file that it names is replaced
        partial = target.with_name(f"{target.name}.partial")
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


def copy_whole(source: Path, path: Path) -> None:
    """Copy a file of moderate size, whole or not at all."""
    write_whole(path, source.read_bytes())


def append_line(path: Path, line: str) -> None:
    """Add a line by one write call. If the disk takes only part of it, that part is cut off again.

    It is not synced: `sync` does that for all lines before a checkpoint counts. An interrupted run repeats what
    came after its checkpoint, and on a network file system a sync per line would cost more than the step."""
    data = f"{line}\n".encode()
    with _appending, _as_write_error(path):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            end = os.fstat(file).st_size
            try:
                while data:
                    data = data[os.write(file, data) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file, end)
                raise
        finally:
            os.close(file)


def sync(path: Path) -> None:
    """Return once the content of a file is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(folder: Path) -> None:
    """Return once the names in a folder are on the disk, where the file system can do that."""
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def both_ends(path: Path, length: int) -> tuple[bytes, bytes, int]:
    """Return the first and the last `length` bytes of a file, which overlap in a short one, and its size."""
    with path.open("rb") as file:
        head = file.read(length)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - length))
        return head, file.read(), size


def is_torn(line: bytes) -> bool:
    """Return True if a crash cut this line short, or left NULs where its content was to come."""
    return not line.endswith(b"\n") or b"\0" in line


def drop_torn_line(path: Path) -> bool:
    """Cut the last line off if a crash left it torn, and return whether it was. Needs no room on the disk."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start = _last_line(file, end)
        file.seek(start)
        torn = start < end and is_torn(file.read())
    if torn:
        os.truncate(path, start)
    return torn


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; none if there is no file. A torn last line is left out: its run
    goes on, or was killed. Raise a DataError with the number of any other line that is not a JSON object."""
    if path.is_file():
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if is_torn(line) and not file.peek(1):
                    return
                yield json_object(line, f"{path}, line {number}")


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """Return the object on a line. Raise a DataError that says where if there is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: not a JSON object")
    return value


@dataclass
class BestEffort:
    """Writes that a run can do without. A failure is a warning: once, and again when the reason changes."""

    what: str  # in the plural, for the warning
    tell: Callable[[str], None]
    _failing: object = None

    def attempt(self, write: Callable[[], None]) -> bool:
        """Return whether `write` could write."""
        try:
            write()
        except OSError as error:
            cause = error.errno or str(error)
            if cause != self._failing:
                reason, _, fix = str(error).partition("\n")
                self.tell(
                    f"warning: {self.what} are not written: {reason}; training goes on" + (fix and f"\n{fix}")
                )
            self._failing = cause
            return False
        if self._failing is not None:
            self.tell(f"note: {self.what} are written again; what came in between is missing")
        self._failing = None
        return True


def free_space(folder: Path) -> str:
    """Return the room on the disk of a folder, for a message."""
    return f"{shutil.disk_usage(folder).free / 1e9:.3f} GB are free"


def _last_line(file: BinaryIO, end: int) -> int:
    """Return where the last line begins."""
    at = max(0, end - 1)  # its own line break does not count
    while at > 0:
        start = max(0, at - _BLOCK)
        file.seek(start)
        found = file.read(at - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        at = start
    return 0


@contextmanager
def _as_write_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        fix = "see that the folder exists and can be written to"
        if error.errno in FULL:
            fix = "make room on that disk, or raise the quota or limit"
        elif error.errno == errno.EROFS:
            fix = "the file system is mounted read-only: mount it for writing, or write to another folder"
        failed = WriteError(f"{path} cannot be written: {reason}\n  {fix}")
        failed.errno = error.errno
        raise failed from error
