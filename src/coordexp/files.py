"""Files and folders: files that survive a crash or a full disk, and the paths and glob patterns that a
user gives.

Files are written whole or not at all, or grow by whole lines. This module imports nothing heavy, so every package
can use it.
"""

import errno
import glob
import json
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from coordexp.errors import DataError, UserError, explain

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RELATIVE_PATHS = "paths are relative to the folder that the command runs in"
INDEX, PARTIAL = ".index", ".partial"  # how the names of index files beside data files end
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # file systems that cannot sync a folder
_BLOCK = 1 << 16
_appending = threading.Lock()  # a failed append removes its half line, and must not remove that of another thread


class WriteError(UserError, OSError):
    """A file could not be written. The message has the path, the reason and a fix."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a crash at any moment leaves either the old content or the new one.

    The content goes to a partial file in the same folder. That file is synced and renamed, and then the folder is
    synced. The mode follows the umask. A path that is not a regular file, such as a pipe, is written directly."""
    data = content.encode() if isinstance(content, str) else content
    with _as_write_error(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        target = path.resolve()  # a link stays, and the file that it points to is replaced
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
    """Add a line with one write call. If the disk takes only part of it, remove that part again.

    The line is not synced: `sync` does that for all lines before a checkpoint counts. A resumed run repeats the
    steps after its checkpoint, and on a network file system a sync per line would take longer than the step."""
    data = f"{line}\n".encode()
    with _appending, _as_write_error(path), path.open("ab", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[os.write(file.fileno(), data) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fileno(), end)
            raise


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
    """Return the first and the last `length` bytes of a file, which overlap in a short file, and its size."""
    with path.open("rb") as file:
        head = file.read(length)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - length))
        return head, file.read(), size


def is_torn(line: bytes) -> bool:
    """Return True if a crash cut this line short, or left NUL bytes in place of its content."""
    return not line.endswith(b"\n") or b"\0" in line


def drop_torn_line(path: Path) -> bool:
    """Remove the last line if a crash left it torn, and return whether it was. This needs no space on the disk."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start = _last_line_start(file, end)
        file.seek(start)
        torn = start < end and is_torn(file.read())
    if torn:
        os.truncate(path, start)
    return torn


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; none if there is no file.

    A torn last line is skipped: the run that writes it is still going on, or was killed. Raise a DataError with
    the number of any other line that is not a JSON object."""
    if path.is_file():
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if is_torn(line) and not file.peek(1):
                    return
                yield json_object(line, f"{path}, line {number}")


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object on a line. Raise a DataError that begins with `where` if there is none."""
    with explain((ValueError, RecursionError), f"{where}: not JSON"):
        value = json.loads(line)
    if not isinstance(value, dict):
        raise DataError(f"{where}: not a JSON object")
    return value


@dataclass
class BestEffort:
    """Writes that a run can do without. A failure gives one warning, and another one when the reason changes."""

    what: str  # a plural noun, for the warning
    notify: Callable[[str], None]
    _failing: object = None

    def attempt(self, write: Callable[[], None]) -> bool:
        """Call `write` and return whether it succeeded."""
        try:
            write()
        except OSError as error:
            cause = error.errno or str(error)
            if cause != self._failing:
                reason, fix = (error.problem, error.fix) if isinstance(error, WriteError) else (str(error), "")
                warning = UserError(f"warning: {self.what} are not written: {reason}; training goes on", fix)
                self.notify(str(warning))
            self._failing = cause
            return False
        if self._failing is not None:
            self.notify(f"note: {self.what} are written again; those in between are missing")
        self._failing = None
        return True


def free_space(folder: Path) -> str:
    """Return the free space on the disk of a folder, as words for a message."""
    return f"{shutil.disk_usage(folder).free / 1e9:.3f} GB are free"


def is_free(folder: Path) -> bool:
    """Return True if a folder does not exist or is empty, so that a command may write to it."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def advise_missing_model(name: str) -> str:
    """Return what to do about a model folder that does not exist. It may be named as on the Hugging Face hub."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        return RELATIVE_PATHS
    return (
        f"{RELATIVE_PATHS}; a model of the Hugging Face hub is downloaded first (hf download {name} --local-dir "
        "DIR) and then given the coordinate tokens (coordexp model add-coords --model DIR --out NEW)"
    )


def match_files(name: str) -> list[Path]:
    """Return the existing files that a path or a glob pattern stands for. A path that exists is no pattern, even
    if it has a character such as `[`. A pattern matches neither folders nor the index files of data files."""
    if Path(name).exists():
        return [Path(name)]
    if not glob.has_magic(name):
        return []
    matches = map(Path, sorted(glob.glob(name, recursive=True)))  # noqa: PTH207, Path refuses absolute patterns
    return [path for path in matches if path.is_file() and not path.name.endswith((INDEX, PARTIAL))]


def find_data_files(names: Sequence[str]) -> list[Path]:
    """Return the files of a data set, which paths and glob patterns name: in the order of the list, and those of a
    pattern in the order of their names. Raise DataError if a name stands for no file, or a file is named twice."""
    files: list[Path] = []
    for name in names:
        matches = match_files(name)
        if not matches:
            raise DataError(describe_missing(name), RELATIVE_PATHS)
        files += matches
    file, count = Counter(files).most_common(1)[0]
    if count > 1:
        raise DataError(
            f"{file} is named twice in {', '.join(names)}",
            "name it once; to train on some files more often, give them a weight in custom.train_data",
        )
    return files


def describe_missing(name: str) -> str:
    """Return the words for a path or a glob pattern that names no file."""
    return f"no file matches {name}" if glob.has_magic(name) else f"{name} does not exist"


def is_encodable(text: str) -> bool:
    """Return True if a text can be written as UTF-8. Half of a surrogate pair, which JSON can spell, cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _last_line_start(file: BinaryIO, end: int) -> int:
    """Return the offset at which the last line begins."""
    at = max(0, end - 1)  # skips the line break of the last line itself
    while at > 0:
        start = max(0, at - _BLOCK)
        file.seek(start)
        line_break = file.read(at - start).rfind(b"\n")
        if line_break >= 0:
            return start + line_break + 1
        at = start
    return 0


@contextmanager
def _as_write_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "check that the folder exists and that you may write to it"
        if error.errno in FULL:
            fix = "make room on that disk, or raise the quota or limit"
        elif error.errno == errno.EROFS:
            fix = "the file system is mounted read-only: mount it for writing, or write to another folder"
        failed = WriteError(f"{path} cannot be written: {error.strerror or error}", fix)
        failed.errno = error.errno
        raise failed from error
