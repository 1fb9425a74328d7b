"""The checkpoints of a run folder: their manifests, which one a run can resume from, and the lock that keeps other
runs out of the folder.

A checkpoint is complete when it has a `manifest.json` with the size and sha256 of every other file in it. The
manifest is written last, when everything else is on the disk. This module imports no torch, so `coordexp verify`
starts quickly.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp.errors import DataError, UserError
from coordexp.files import free_space, sync, sync_folder, write_json
from coordexp.tasks import remind

MANIFEST = "manifest.json"
UNFINISHED = f"was not written to its end: it has no {MANIFEST}"
FORMAT = 1
LOCK = "run.lock"
_NAME = re.compile(r"checkpoint-(\d+)")
Notify = Callable[[str], None]


class SaveError(UserError, OSError):
    """A checkpoint could not be written."""


@dataclass(frozen=True)
class Verdict:
    """The result of examining a checkpoint. A run can resume from it if `fault` is empty."""

    checkpoint: Path
    fault: str = ""
    files: int = 0
    size: int = 0

    def __str__(self) -> str:
        if self.fault:
            return f"{self.checkpoint.name} {self.fault}"
        return f"{self.checkpoint.name} is intact: {self.files} files, {self.size / 1e9:.3f} GB"


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the name of a checkpoint, or None if the folder has another name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def checkpoints(folder: Path) -> list[Path]:
    """Return the folders named `checkpoint-<number>`, newest first."""
    named = [(step_of(path), path) for path in folder.glob("checkpoint-*") if path.is_dir()]
    return [path for _, path in sorted(((step, path) for step, path in named if step is not None), reverse=True)]


@contextmanager
def hold_folder(folder: Path, notify: Notify) -> Iterator[None]:
    """Keep other runs out of a run folder until the end of the block. Raise UserError if another run is in it.

    The kernel releases the lock when this process ends, however it ends. It is a POSIX lock, because processes
    that are forked from this one do not inherit it, so what a killed run leaves for a moment keeps nobody out.
    Nothing else in this process may open the file: closing it would release the lock."""
    with (folder / LOCK).open("a+b", buffering=0) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read().decode(errors="replace") or "another process"
            fix = "wait for its end or stop it, or set training.output_dir to a new folder"
            raise UserError(f"{folder} is in use by a run: {holder}", fix) from error
        except OSError as error:
            reason = f"{folder} cannot be locked ({error.strerror})"
            notify(f"warning: {reason}; a second run in it would not be noticed, so do not start one")
        with suppress(OSError):  # on a full disk, the message above lacks the process
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}".encode())
        yield


def choose_checkpoint(folder: Path, resume: bool, notify: Notify) -> Path | None:
    """Return the checkpoint to resume from, if any. Raise DataError if a run may not start in this folder."""
    if resume:
        return newest_intact(folder, notify)
    if existing := next(filter(is_finished, checkpoints(folder)), None):
        raise DataError(
            f"{folder} already holds {existing.name}",
            "add --resume to continue from there, or set training.output_dir to a new folder",
        )
    return None


def newest_intact(folder: Path, notify: Notify) -> Path | None:
    """Return the newest checkpoint that a run can resume from, or None if none was ever written to its end. Report
    which ones were passed over, and why. Only as many as needed are read. Raise DataError if none is intact and at
    least one is damaged or may be from another program."""
    faulty: list[Verdict] = []
    for checkpoint in checkpoints(folder):
        verdict = examine(checkpoint, notify)
        if verdict.fault:
            faulty.append(verdict)
            continue
        for other in faulty:
            notify(f"warning: {other}; it is left unchanged until the run saves that step again")
        if faulty:
            notify(f"note: {verdict}")
        return checkpoint
    is_ours = (folder / "run.json").is_file()  # checkpoints of other programs have no manifests either
    if any(verdict.fault != UNFINISHED or not is_ours for verdict in faulty):
        raise DataError(
            f"{folder} has no checkpoint to resume from: {'; '.join(map(str, faulty))}",
            "copy an intact checkpoint there, remove them to start from the beginning, or set training.output_dir "
            "to a new folder",
        )
    for verdict in faulty:
        notify(f"warning: {verdict}; no other checkpoint is there, so the run starts from the beginning")
    return None


def examine(checkpoint: Path, notify: Notify) -> Verdict:
    """Compare the files of a checkpoint with its manifest: sizes first, then every byte."""
    path = checkpoint / MANIFEST
    if not path.is_file():
        return Verdict(checkpoint, UNFINISHED)
    try:
        listed = {
            str(name): (int(file["size"]), str(file["sha256"])) for name, file in _read_manifest(path).items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Verdict(checkpoint, f"is damaged: {path} cannot be read ({error})")
    missing = [name for name in listed if not (checkpoint / name).is_file()]
    if missing:
        return Verdict(checkpoint, f"has no {' and no '.join(missing)}: a run could not resume from it exactly")
    for name, (size, _) in listed.items():
        actual = (checkpoint / name).stat().st_size
        if actual != size:
            return Verdict(checkpoint, f"is damaged: {checkpoint / name} has {actual} bytes, not {size}")
    try:
        digests = hash_files(checkpoint, list(listed), notify)
    except OSError as error:
        return Verdict(checkpoint, f"is damaged: {error.strerror}")
    for name, (_, digest) in listed.items():
        if digests[name] != digest:
            return Verdict(checkpoint, f"is damaged: {checkpoint / name} differs from what was saved (sha256)")
    return Verdict(checkpoint, files=len(listed), size=sum(size for size, _ in listed.values()))


def is_finished(checkpoint: Path) -> bool:
    """Return True if the checkpoint was written to its end. The contents of its files are not checked."""
    return (checkpoint / MANIFEST).is_file()


@contextmanager
def saving(checkpoint: Path) -> Iterator[None]:
    """Raise SaveError if the disk refuses a file of the checkpoint. safetensors, tokenizers and torch each
    raise their own error for a full disk."""
    try:
        yield
    except Exception as error:
        reason = _disk_problem(error, checkpoint)
        if reason is None:
            raise
        step = step_of(checkpoint) or 0
        older = next(
            (path for path in checkpoints(checkpoint.parent) if (step_of(path) or 0) < step and is_finished(path)),
            None,
        )
        then = f"--resume then continues from {older.name}" if older else "there is no earlier checkpoint"
        fix = f"free space on that disk ({free_space(checkpoint.parent)}), make it writable, or look at its log"
        raise SaveError(f"{checkpoint} cannot be saved: {reason}", f"{fix}; {then}") from error


def clear(checkpoint: Path) -> None:
    """Remove a damaged or unfinished checkpoint of this step, if there is one."""
    if checkpoint.exists():
        (checkpoint / MANIFEST).unlink(missing_ok=True)  # first, so that a part of it does not count as complete
        shutil.rmtree(checkpoint)


def sync_checkpoint(checkpoint: Path) -> None:
    """Return once every file of the checkpoint, and every line that the run has logged, is on the disk.

    All files get the mode that follows from the umask, because safetensors always makes its files private
    (0600)."""
    files = list(_files(checkpoint))
    own = next((file for file in files if file.name == "stream_0.json"), None)
    for file in files:
        if own and file.suffix == ".safetensors":
            with suppress(OSError):  # not every file system has modes
                file.chmod(own.stat().st_mode & 0o777)
        sync(file)
    for folder in {file.parent for file in files} | {checkpoint, checkpoint.parent}:
        sync_folder(folder)
    for lines in checkpoint.parent.glob("*.jsonl"):
        sync(lines)


def write_manifest(checkpoint: Path, notify: Notify) -> None:
    """Write the manifest of a checkpoint whose files are all on the disk."""
    names = sorted(str(file.relative_to(checkpoint)) for file in _files(checkpoint) if file.name != MANIFEST)
    digests = hash_files(checkpoint, names, notify)
    files = {name: {"size": (checkpoint / name).stat().st_size, "sha256": digests[name]} for name in names}
    write_json(checkpoint / MANIFEST, {"format": FORMAT, "files": files})


def hash_files(folder: Path, names: list[str], notify: Notify) -> dict[str, str]:
    """Return the sha256 of files by name. Several threads read them, the largest file first."""
    sizes = {name: (folder / name).stat().st_size for name in names}
    largest_first = sorted(names, key=sizes.__getitem__, reverse=True)

    def digest(name: str) -> str:
        try:
            with (folder / name).open("rb", buffering=0) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise OSError(error.errno, f"{folder / name} cannot be read: {error.strerror}") from error

    message = f"hashing the {sum(sizes.values()) / 1e9:.1f} GB of {folder.name}"
    with remind(notify, message), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(largest_first, pool.map(digest, largest_first), strict=True))


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Remove older checkpoints until at most `limit` are left, unfinished ones first. The best one stays, and
    so do folders that are not named `checkpoint-<number>`."""
    if not limit or limit <= 0:
        return
    step = step_of(newest) or 0
    older = [path for path in checkpoints(newest.parent) if (step_of(path) or 0) < step]
    needed = {newest, Path(best)} if best else {newest}
    excess = 1 + len(older) - max(limit, len(needed))
    for path in sorted((path for path in older if path not in needed), key=_worth)[: max(0, excess)]:
        with suppress(OSError):
            clear(path)


def _disk_problem(error: Exception, checkpoint: Path) -> str | None:
    """Return why the disk refused a file, or None if the error has another cause."""
    text = str(error).partition("\n")[0]
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return text
    if re.search(r"\(os error \d+\)", text):  # an error of Rust code, in safetensors and tokenizers
        return text
    frames = (frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__))
    if isinstance(error, RuntimeError) and "torch.serialization" in frames:  # its errors have no errno
        return f"torch could not write a file to its end ({text})"
    return None


def _worth(checkpoint: Path) -> tuple[bool, int]:
    """Return a sort key. Unfinished checkpoints are worth least, then older ones."""
    return is_finished(checkpoint), step_of(checkpoint) or 0


def _read_manifest(manifest: Path) -> dict[str, Any]:
    content = json.loads(manifest.read_text(encoding="utf-8"))
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}, and this version reads {FORMAT}")
    return dict(content["files"])


def _files(checkpoint: Path) -> Iterator[Path]:
    return (path for path in checkpoint.rglob("*") if path.is_file())
