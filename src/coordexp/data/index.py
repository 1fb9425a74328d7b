"""Where the records of files begin, and how many objects they have.

A large file gets an index file beside it (`train.jsonl.index`), which is written once and then mapped into
memory, so a run on a hundred million records starts at once, and the processes of a machine share the pages. Small
files of a data set share an index file per gigabyte (`part-0.jsonl.4f2a91c0.index`). An index file is made again
when a data file looks changed: another size, another time of the last change, or another file under the same name.

    {"format": 2, "files": [{"name": "train.jsonl", "size": 1900, ..., "records": 10, "blanks": 0, "sha256": ...}]}
    the offsets of all files, their blanks, and their counts, as `RecordIndex` has them
"""

import fcntl
import hashlib
import json
import os
import re
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from coordexp.errors import DataError
from coordexp.files import INDEX, PARTIAL, open_file
from coordexp.tasks import Task, ignore

LARGE = 2**24  # bytes of a data file, or of several, from which on they get an index file
SHARED = 2**30  # bytes of small files that share an index file
BLOCK = 2**20  # bytes that are searched at once
FORMAT = 2
REPORTED = 2.0  # seconds between two messages about the progress
_COCO = rb'\s*\{\s*"(info"\s*:\s*\{|(images|annotations|categories|licenses)"\s*:\s*\[\s*[{\]])'
# How files begin that are not of records, what they are, and what to do.
_OTHER_FORMATS = (
    (rb"\x1f\x8b|\x28\xb5\x2f\xfd|BZh|PK\x03\x04|\xfd7zXZ", "is compressed", "unpack it, e.g. with gunzip"),
    (_COCO, "is a COCO file", "convert it: coordexp data import coco FILE --images DIR --out train.jsonl"),
    (rb"\s*\[\s*\{", "is one JSON list, not one record per line", "see docs/data.md, and `coordexp data import`"),
)

Identity = dict[str, int]  # what changes when a file is changed or replaced


@dataclass(frozen=True)
class RecordIndex:
    """The byte at which each record of a file begins, and at the end that at which the file ends; the number of
    objects of each record; how many records come before each blank line; the sha256 of the file; and what it
    was when it was read."""

    offsets: NDArray[np.uint64]
    blanks: NDArray[np.uint64]
    counts: NDArray[np.uint32]
    sha256: str
    identity: Identity

    def __len__(self) -> int:
        return len(self.counts)

    def line_number(self, index: int) -> int:
        """Return the number of the record's line, from 1."""
        return index + 1 + int(np.searchsorted(self.blanks, index, side="right"))


def open_records(path: Path) -> BinaryIO:
    """Open a file of records. Raise DataError if it is not a regular file, or begins as one of another format."""
    file = open_file(path)
    head = os.pread(file.fileno(), 4096, 0)
    for pattern, problem, fix in _OTHER_FORMATS:
        if re.match(pattern, head):
            file.close()
            raise DataError(f"{path} {problem}", fix)
    return file


def identify(facts: os.stat_result) -> Identity:
    names = ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")
    return {name.removeprefix("st_"): getattr(facts, name) for name in names}


def open_indices(paths: Sequence[Path], notify: Callable[[str], None] = ignore) -> list[RecordIndex]:
    """Return the indices of files of records. Map the index files, or write them, several at a time. Where that is
    not possible, an index stays in memory, and `notify` gets a warning. It also says how much has been read."""
    groups = _group_files([(path, identify(path.stat())) for path in paths])
    progress = _Progress(groups, notify)
    waiting, done = iter(groups), dict[Path, RecordIndex]()

    def open_groups() -> None:
        for group in waiting:
            done.update(zip((path for path, _ in group), _open_group(group, progress), strict=True))

    for task in [Task(open_groups) for _ in range(min(len(groups), len(os.sched_getaffinity(0))))]:
        task.result()
    return [done[path] for path in paths]


Group = list[tuple[Path, Identity]]  # files that share an index file


def _group_files(files: Group) -> list[Group]:
    groups, small = list[Group](), Group()
    for path, identity in files:
        if identity["size"] >= LARGE:
            groups.append([(path, identity)])
            continue
        small.append((path, identity))
        if _count_bytes(small) >= SHARED:
            groups.append(small)
            small = []
    return [*groups, small] if small else groups


def _count_bytes(group: Group) -> int:
    return sum(identity["size"] for _, identity in group)


class _Progress:
    """Says every few seconds how much of all files has been read. Several threads add to it."""

    def __init__(self, groups: Sequence[Group], notify: Callable[[str], None]) -> None:
        self.notify = notify
        self._name = _describe([file for group in groups for file in group])
        self._total, self._done = sum(map(_count_bytes, groups)), 0
        self._lock, self._reported = Lock(), time.monotonic()

    def add(self, size: int) -> None:
        with self._lock:
            self._done += size
            if is_due := time.monotonic() - self._reported > REPORTED:
                self._reported = time.monotonic()
        if is_due:
            self.notify(f"reading {self._name} for the first time: {self._done / self._total:.0%}")


def _describe(group: Group) -> str:
    others = len(group) - 1
    return f"{group[0][0]}{f' and {others:,} more files' if others else ''}"


def _open_group(group: Group, progress: _Progress) -> list[RecordIndex]:
    if _count_bytes(group) < LARGE:
        return [_scan(path, identity, progress) for path, identity in group]
    first, names = group[0][0], _name_files(group)
    code = hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()[:8]
    place = first.with_name(f"{first.name}{f'.{code}' if len(group) > 1 else ''}{INDEX}")
    if (indices := _map_indices(place, group)) is None:
        with open_file(first) as file, _waiting_for_others(file, group, progress.notify):
            if (indices := _map_indices(place, group)) is None:
                return _make_indices(place, group, progress)
    progress.add(_count_bytes(group))
    return indices


def _make_indices(place: Path, group: Group, progress: _Progress) -> list[RecordIndex]:
    indices = [_scan(path, identity, progress) for path, identity in group]
    try:
        _write(place, _name_files(group), indices)
    except OSError as error:
        every = f"every start reads {_describe(group)} to the end"
        progress.notify(f"warning: {place} cannot be written ({error.strerror}), so {every}")
        return indices
    return _map_indices(place, group) or indices  # mapped pages are shared, those of a scan are not


def _name_files(group: Group) -> list[str]:
    """Return the paths of files, from the folder of the first one."""
    return [os.path.relpath(path, group[0][0].parent) for path, _ in group]


@contextmanager
def _waiting_for_others(file: BinaryIO, group: Group, notify: Callable[[str], None]) -> Iterator[None]:
    """Let one process at a time pass, as far as the file system has locks. Without them, each process reads the
    files by itself."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        notify(f"waiting for another process, which reads {_describe(group)} for the first time")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        pass
    yield  # closing the file ends the lock


def _scan(path: Path, identity: Identity, progress: _Progress) -> RecordIndex:
    """Read a whole file once. Raise DataError if it is not at the end what its identity says. The hash, which
    cannot be made in parts, takes as long as the search, and is made beside it."""
    offsets, blanks, counts = array("Q"), array("Q"), array("I")
    sha256, offset = hashlib.sha256(), 0
    with open_records(path) as file:
        while block := file.read(BLOCK) + file.readline():
            hashing = Task(sha256.update, block)
            starts, of_records, before_blanks = _search(block)
            blanks.frombytes((before_blanks + len(offsets)).astype(np.uint64).tobytes())
            offsets.frombytes((starts + offset).astype(np.uint64).tobytes())
            counts.frombytes(of_records.astype(np.uint32).tobytes())
            offset += len(block)
            hashing.result()
            progress.add(len(block))
        offsets.append(offset)
        if identify(os.fstat(file.fileno())) != identity:
            raise DataError(f"{path} was changed while it was read", "start again when the file is complete")
    return RecordIndex(
        np.frombuffer(offsets, dtype=np.uint64),
        np.frombuffer(blanks, dtype=np.uint64),
        np.frombuffer(counts, dtype=np.uint32),
        sha256.hexdigest(),
        identity,
    )


def _search(block: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return where the records of whole lines begin, how many objects each of them has, and how many records come
    before each blank line."""
    block = block if block.endswith(b"\n") else block + b"\n"
    text = np.frombuffer(block, dtype=np.uint8)
    bounds = np.concatenate([[0], np.flatnonzero(text == ord("\n")) + 1])
    starts, counts = bounds[:-1], np.diff(np.searchsorted(_find_objects(text), bounds))
    is_blank = np.zeros(len(starts), dtype=bool)
    for line in np.flatnonzero(text[starts] <= ord(" ")):
        is_blank[line] = not block[bounds[line] : bounds[line + 1]].strip()
    blanks = np.flatnonzero(is_blank)
    return starts[~is_blank], counts[~is_blank], blanks - np.arange(len(blanks))


def _find_objects(text: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return where the key "desc" stands. Each object has it once; inside of a text, its quotes are escaped."""
    key = b'"desc"'
    starts = np.flatnonzero((text[:-1] == key[0]) & (text[1:] == key[1]))
    starts = starts[starts < len(text) - len(key)]
    for place, byte in enumerate(key):
        starts = starts[text[starts + place] == byte]
    ends = starts + len(key)
    while (is_space := (text[ends] <= ord(" ")) & (text[ends] != ord("\n"))).any():
        ends = ends + is_space
    objects: NDArray[np.int64] = starts[text[ends] == ord(":")]
    return objects


def _write(place: Path, names: Sequence[str], indices: Sequence[RecordIndex]) -> None:
    """Write the index file, whole or not at all."""
    files = [
        {
            "name": name,
            **index.identity,
            "records": len(index),
            "blanks": len(index.blanks),
            "sha256": index.sha256,
        }
        for name, index in zip(names, indices, strict=True)
    ]
    header = json.dumps({"format": FORMAT, "files": files}).encode()
    padding = b" " * (-(len(header) + 1) % 8)  # arrays begin at a multiple of their size
    partial = place.with_name(f"{place.name}.{uuid4().hex[:8]}{PARTIAL}")
    try:
        with partial.open("xb") as file:
            file.write(header + padding + b"\n")
            for name in ("offsets", "blanks", "counts"):
                for index in indices:
                    file.write(getattr(index, name).data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(place)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _map_indices(place: Path, group: Group) -> list[RecordIndex] | None:
    """Map an index file into memory. Return None if there is none that can be read and fits the data files."""
    expected = [{"name": name, **identity} for name, (_, identity) in zip(_name_files(group), group, strict=True)]
    try:
        with place.open("rb") as file:
            header: dict[str, Any] = json.loads(file.readline())
            files = header["files"]
            known = [{name: entry[name] for name in expected[0]} for entry in files]
            records, blanks = ([int(entry[name]) for entry in files] for name in ("records", "blanks"))
            size = 8 * (sum(records) + len(files) + sum(blanks)) + 4 * sum(records)
            length = os.fstat(file.fileno()).st_size - file.tell()
            if header["format"] != FORMAT or known != expected or length != size:
                return None
            content = np.memmap(file, mode="r", offset=file.tell(), shape=(size,)).view(np.ndarray)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    hashes = [str(entry["sha256"]) for entry in files]
    first_blank = 8 * (sum(records) + len(files))
    first_count = first_blank + 8 * sum(blanks)
    offsets = np.split(content[:first_blank].view(np.uint64), np.cumsum([count + 1 for count in records[:-1]]))
    before_blanks = np.split(content[first_blank:first_count].view(np.uint64), np.cumsum(blanks[:-1]))
    counts = np.split(content[first_count:].view(np.uint32), np.cumsum(records[:-1]))
    identities = (identity for _, identity in group)
    return [RecordIndex(*parts) for parts in zip(offsets, before_blanks, counts, hashes, identities, strict=True)]
