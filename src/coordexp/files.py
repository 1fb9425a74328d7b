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
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from coordexp.errors import DataError, UserError, describe_exception, explain

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RELATIVE_PATHS = "paths are relative to the folder that the command runs in"
MODEL_PATHS = (
    f"{RELATIVE_PATHS}; a model of the Hugging Face hub has a name such as Qwen/Qwen3-VL-4B-Instruct, and gets "
    "its coordinate tokens with: coordexp model add-coords --model Qwen/Qwen3-VL-4B-Instruct --out DIR"
)
MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]  # of a model on the Hugging Face hub
LOCAL_FOLDERS = ("checkpoints", "models", "outputs", "runs")  # never the owner of a model on the hub
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
INDEX, PARTIAL = ".index", ".partial"  # how the names of index files beside data files end
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # file systems that cannot sync a folder
_appending = threading.Lock()  # a failed append removes its half line, and must not remove that of another thread


class WriteError(UserError, OSError):
    """A file could not be written. The message has the path, the reason and a fix."""


class NotAFileError(DataError, OSError):
    """A path that has to be that of a file is a pipe, a device or a folder."""

    strerror = "not a regular file"


def open_file(path: Path) -> BinaryIO:
    """Open an image, records or annotations of a user for reading. Raise NotAFileError if they are not a regular
    file: reading a device may never end, and opening a pipe may wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(
            f"{path}: {NotAFileError.strerror}", "give a file, and not a pipe, a device or a folder"
        )
    return os.fdopen(descriptor, "rb")


def read_file(path: Path) -> bytes:
    """Return the content of a file that `open_file` opens."""
    with open_file(path) as file:
        return file.read()


@contextmanager
def write_parts(path: Path, *, durable: bool = True) -> Iterator[Callable[[str | bytes | bytearray], None]]:
    """Yield a function that adds to a file of any size. A crash at any moment leaves either the old content or the
    new one. If the block ends with an exception, the old content stays.

    The content goes to a partial file in the same folder. That file is synced and renamed, and then the folder is
    synced. The mode follows the umask. If it is not `durable`, nothing waits for the disk, and a crash of the
    machine may leave an empty file."""
    target = path.resolve()  # a link stays, and the file that it points to is replaced
    partial = target.with_name(f"{target.name}{PARTIAL}")
    with ExitStack() as cleanup:
        with _as_write_error(path):
            target.parent.mkdir(parents=True, exist_ok=True)
            cleanup.callback(partial.unlink, missing_ok=True)
            file = partial.open("wb")
        cleanup.callback(_close, file)

        def write(data: str | bytes | bytearray) -> None:
            with _as_write_error(path):
                file.write(data.encode(errors="backslashreplace") if isinstance(data, str) else data)

        yield write
        with _as_write_error(path):
            file.flush()
            if durable:
                os.fsync(file.fileno())
            partial.replace(target)
            if durable:
                sync_folder(target.parent)


def write_whole(path: Path, content: str | bytes | Iterable[str], *, durable: bool = True) -> None:
    """Write a file as `write_parts` does: whole or not at all, also if making a piece of the content raises an
    error. A path that is not a regular file, such as a pipe, is written directly."""
    pieces = [content] if isinstance(content, str | bytes) else content
    if path.exists() and not path.is_file():
        with _as_write_error(path), path.open("wb") as file:
            file.writelines(piece.encode() if isinstance(piece, str) else piece for piece in pieces)
        return
    with write_parts(path, durable=durable) as write:
        for piece in pieces:
            write(piece)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all."""
    write_whole(path, json.dumps(value, indent=2) + "\n")


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


def both_ends(file: IO[bytes], length: int) -> tuple[bytes, bytes, int]:
    """Return the first and the last `length` bytes of a file, which overlap in a short file, and its size."""
    head = file.read(length)
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - length))
    return head, file.read(length), size


def is_torn(line: bytes) -> bool:
    """Return True if a crash cut this line short, or left NUL bytes in place of its content."""
    return not line.endswith(b"\n") or b"\0" in line


def drop_torn_line(path: Path) -> bool:
    """Remove the last line if a crash left it torn, and return whether it was. This needs no space on the disk."""
    content = path.read_bytes() if path.is_file() else b""
    start = content.rfind(b"\n", 0, -1) + 1
    is_dropped = start < len(content) and is_torn(content[start:])
    if is_dropped:
        os.truncate(path, start)
    return is_dropped


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


def is_hub_name(name: str) -> bool:
    """Return whether a name that is no path here is that of a model on the Hugging Face hub. A name below a folder
    that exists here, or that usually has local files, is a path with a mistake in it."""
    owner = name.partition("/")[0]
    return bool(_HUB_NAME.fullmatch(name)) and owner not in LOCAL_FOLDERS and not Path(owner).exists()


def find_model(name: str | Path, *, download: bool = True) -> Path:
    """Return the folder of a model. A name such as Qwen/Qwen3-VL-4B-Instruct stands for the model of the Hugging
    Face hub in the local cache; it is downloaded if it is not there. Any other name is a path, which may not
    exist.

    Raise UserError with the command that downloads the model if that is not possible here."""
    if Path(name).exists() or not is_hub_name(str(name)):
        return Path(name)
    from huggingface_hub import snapshot_download  # takes a moment

    try:
        return Path(snapshot_download(str(name), allow_patterns=MODEL_FILES, local_files_only=not download))
    except Exception as error:  # also those of the HTTP library, if a connection breaks during a download
        reason = (
            "" if not download else f", and it cannot be downloaded: {describe_exception(error).splitlines()[0]}"
        )
        raise UserError(
            f"{name} is neither a folder here nor a model in the local cache of the Hugging Face hub{reason}",
            f"where there is a connection, run: hf download {name} (it fills the cache in $HF_HOME), or: hf "
            f"download {name} --local-dir DIR, and give DIR",
        ) from error


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


def _close(file: BinaryIO) -> None:
    with suppress(OSError):  # of a full disk, which the last write has reported
        file.close()


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
