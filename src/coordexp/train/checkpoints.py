"""Checkpoints of a run folder: the manifest that ends each of them, and which one a run can go on from.

A checkpoint counts when it has a `manifest.json` with the size and sha256 of every other file in it. That is
written last, when everything else is on the disk. Imports no torch, so that `coordexp run verify` starts quickly.
"""

import hashlib
import json
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp.errors import UserError
from coordexp.files import free_space, sync, sync_folder, write_json

MANIFEST = "manifest.json"
FORMAT = 1
NEEDED = ("optimizer*", "scheduler.pt", "trainer_state.json")  # besides the streams, to go on exactly
ANNOUNCED = "manifest_follows"  # in the state of a stream: without a manifest, such a checkpoint is not complete
_NAME = re.compile(r"checkpoint-(\d+)")
_BLOCK = 1 << 22
_QUIET_S, _EVERY_S = 2.0, 30.0  # progress is told after so long, and then so often
Tell = Callable[[str], None]


class SaveError(UserError, OSError):
    """A checkpoint that could not be written. The message says what is in the way, and what to go on from."""


@dataclass(frozen=True)
class Verdict:
    """What was seen of a checkpoint. Without a fault, a run can go on from it."""

    checkpoint: Path
    fault: str = ""
    has_manifest: bool = True
    files: int = 0
    size: int = 0

    def __str__(self) -> str:
        if self.fault:
            return f"{self.checkpoint.name} {self.fault}"
        if not self.has_manifest:
            return f"{self.checkpoint.name} has no {MANIFEST}, as in earlier versions: its files were not verified"
        return f"{self.checkpoint.name} is intact: {self.files} files, {self.size / 1e9:.3f} GB"


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the name of a checkpoint, None if it is not named as one."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def checkpoints(folder: Path) -> list[Path]:
    """Return the folders named `checkpoint-<number>`, newest first."""
    named = [(step_of(path), path) for path in folder.glob("checkpoint-*") if path.is_dir()]
    return [path for _, path in sorted(((step, path) for step, path in named if step is not None), reverse=True)]


def newest_intact(folder: Path, tell: Tell) -> Path | None:
    """Return the newest checkpoint that a run can go on from, None if there are none at all. Tell which ones were
    passed over, and why. Only as many as needed are read. Raise FileNotFoundError if every one has a fault."""
    faulty: list[Verdict] = []
    for checkpoint in checkpoints(folder):
        verdict = examine(checkpoint, tell)
        if verdict.fault:
            faulty.append(verdict)
            continue
        for other in faulty:
            tell(f"warning: {other}\n  it is left as it is until the run saves that step again")
        if faulty or not verdict.has_manifest:
            tell(f"note: {verdict}")
        return checkpoint
    if faulty:
        raise FileNotFoundError(
            f"{folder} has no checkpoint to go on from: {'; '.join(map(str, faulty))}\n"
            "  copy a checkpoint there again, remove them to start from the beginning, or set "
            "training.output_dir to a new folder"
        )
    return None


def examine(checkpoint: Path, tell: Tell) -> Verdict:
    """Compare the files of a checkpoint with its manifest: sizes first, then every byte."""
    try:
        return _examine(checkpoint, tell)
    except OSError as error:
        return Verdict(checkpoint, f"is damaged: {error.strerror or error}")


def _examine(checkpoint: Path, tell: Tell) -> Verdict:
    path = checkpoint / MANIFEST
    if not path.is_file():
        return Verdict(checkpoint, _fault_without_manifest(checkpoint), has_manifest=False)
    try:
        listed = {str(name): (int(file["size"]), str(file["sha256"])) for name, file in _listed(path).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Verdict(checkpoint, f"is damaged: {path} cannot be read ({error})")
    missing = [name for name in listed if not (checkpoint / name).is_file()]
    if missing:
        return Verdict(checkpoint, _fault_of_missing(missing))
    for name, (size, _) in listed.items():
        found = (checkpoint / name).stat().st_size
        if found != size:
            return Verdict(checkpoint, f"is damaged: {checkpoint / name} has {found} bytes, not {size}")
    digests = hash_files(checkpoint, list(listed), tell)
    for name, (_, digest) in listed.items():
        if digests[name] != digest:
            return Verdict(checkpoint, f"is damaged: {checkpoint / name} has other bytes than were saved (sha256)")
    return Verdict(checkpoint, files=len(listed), size=sum(size for size, _ in listed.values()))


def is_finished(checkpoint: Path) -> bool:
    """Return True if the checkpoint was written to its end. What its files hold is not looked at."""
    return (checkpoint / MANIFEST).is_file() or not _fault_of_streams(checkpoint)


@contextmanager
def saving(checkpoint: Path) -> Iterator[None]:
    """Turn the errors by which a disk refuses a checkpoint into a SaveError. safetensors, tokenizers and torch
    raise their own kinds for a full disk."""
    try:
        yield
    except Exception as error:
        reason = _refusal(error, checkpoint)
        if reason is None:
            raise
        step = step_of(checkpoint) or 0
        older = next(
            (path for path in checkpoints(checkpoint.parent) if (step_of(path) or 0) < step and is_finished(path)),
            None,
        )
        then = f"--resume then goes on from {older.name}" if older else "there is no earlier checkpoint"
        raise SaveError(
            f"{checkpoint} cannot be saved: {reason}\n"
            f"  make room on that disk ({free_space(checkpoint.parent)}), or make it writable; {then}"
        ) from error


def clear(checkpoint: Path) -> None:
    """Remove what is left of a checkpoint of this step that was damaged or not finished, if there is one."""
    if checkpoint.exists():
        (checkpoint / MANIFEST).unlink(missing_ok=True)  # first, so that half of it does not count as a whole
        shutil.rmtree(checkpoint)


def sync_checkpoint(checkpoint: Path) -> None:
    """Return once every file of the checkpoint, and every line that the run has logged, is on the disk.

    Files get the mode of those that this process makes itself: safetensors makes its files private (0600),
    whatever the umask is."""
    files = list(_files(checkpoint))
    own = next((file for file in files if file.name == "stream_0.json"), None)
    for file in files:
        if own and file.suffix == ".safetensors":
            with suppress(OSError):  # not every file system knows modes
                file.chmod(own.stat().st_mode & 0o777)
        sync(file)
    for folder in {file.parent for file in files} | {checkpoint, checkpoint.parent}:
        sync_folder(folder)
    for lines in checkpoint.parent.glob("*.jsonl"):
        sync(lines)


def write_manifest(checkpoint: Path, tell: Tell) -> None:
    """Write the manifest of a checkpoint whose files are all on the disk."""
    names = sorted(str(file.relative_to(checkpoint)) for file in _files(checkpoint) if file.name != MANIFEST)
    digests = hash_files(checkpoint, names, tell)
    files = {name: {"size": (checkpoint / name).stat().st_size, "sha256": digests[name]} for name in names}
    write_json(checkpoint / MANIFEST, {"format": FORMAT, "files": files})


def hash_files(folder: Path, names: list[str], tell: Tell) -> dict[str, str]:
    """Return the sha256 of files by name. They are read by several threads, the largest first."""
    sizes = {name: (folder / name).stat().st_size for name in names}
    done = dict.fromkeys(names, 0)

    def digest(name: str) -> str:
        seen = hashlib.sha256()
        try:
            with (folder / name).open("rb", buffering=0) as file:
                while block := file.read(_BLOCK):
                    seen.update(block)
                    done[name] += len(block)
        except OSError as error:
            raise OSError(error.errno, f"{folder / name} cannot be read: {error.strerror}") from error
        return seen.hexdigest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        futures = {name: pool.submit(digest, name) for name in sorted(names, key=sizes.__getitem__, reverse=True)}
        next_word = time.monotonic() + _QUIET_S
        while wait(futures.values(), timeout=max(0.0, next_word - time.monotonic())).not_done:
            read, total = sum(done.values()) / 1e9, sum(sizes.values()) / 1e9
            tell(f"hashing {folder.name}: {read:.1f} of {total:.1f} GB")
            next_word = time.monotonic() + _EVERY_S
        return {name: future.result() for name, future in futures.items()}


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Remove older checkpoints until at most `limit` are left, unfinished ones first. The best one, and names that
    are not `checkpoint-<number>`, stay."""
    if not limit or limit <= 0:
        return
    step = step_of(newest) or 0
    older = [path for path in checkpoints(newest.parent) if (step_of(path) or 0) < step]
    kept = {newest, Path(best)} if best else {newest}
    excess = 1 + len(older) - max(limit, len(kept))
    for path in sorted((path for path in older if path not in kept), key=_worth)[: max(0, excess)]:
        with suppress(OSError):
            clear(path)


def _refusal(error: Exception, checkpoint: Path) -> str | None:
    """Return why the disk refused a file, None if the error is another one."""
    text = str(error).partition("\n")[0]
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return text
    if re.search(r"\(os error \d+\)", text):  # Rust's words, in safetensors and tokenizers
        return text
    frames = (frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__))
    if isinstance(error, RuntimeError) and "torch.serialization" in frames:  # whose errors have no number
        latest = max(_files(checkpoint), key=lambda file: file.stat().st_mtime_ns, default=checkpoint)
        return f"torch could not write {latest.name} to its end ({text})"
    return None


def _worth(checkpoint: Path) -> tuple[bool, int]:
    return is_finished(checkpoint), step_of(checkpoint) or 0


def _listed(manifest: Path) -> dict[str, Any]:
    content = json.loads(manifest.read_text())
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}, and this version reads {FORMAT}")
    return dict(content["files"])


def _fault_without_manifest(checkpoint: Path) -> str:
    """Return what is wrong by the names of the files, which is all that earlier versions left to go by."""
    missing = [name for name in NEEDED if not any(checkpoint.glob(name))]
    return _fault_of_streams(checkpoint) or (_fault_of_missing(missing) if missing else "")


def _fault_of_streams(checkpoint: Path) -> str:
    """Return what is wrong with the states of the streams, which every rank writes last."""
    first = checkpoint / "stream_0.json"
    unfinished = f"was not written to its end: it has no {MANIFEST}"
    if not first.is_file():
        return unfinished
    try:
        state = json.loads(first.read_text())
        ranks = int(state["order"]["ranks"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"is damaged: {first} cannot be read ({type(error).__name__}: {error})"
    if state.get(ANNOUNCED) or not all((checkpoint / f"stream_{rank}.json").is_file() for rank in range(ranks)):
        return unfinished
    return ""


def _fault_of_missing(names: list[str]) -> str:
    return f"has no {' and no '.join(names)}: going on from it would not be exact"


def _files(checkpoint: Path) -> Iterator[Path]:
    return (path for path in checkpoint.rglob("*") if path.is_file())
