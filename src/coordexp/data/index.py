"""Where the records of a file begin, and how many objects they have.

A large file gets an index file beside it (`train.jsonl.index`), which is written once and then mapped into memory,
so a run on ten million records starts at once, and the processes of a machine share the pages. The index also has
the sha256 of the data file. It is made again when the data file looks changed: another size, another time of the
last change, or another file under the same name.
"""

import fcntl
import hashlib
import json
import os
import re
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from coordexp.errors import DataError
from coordexp.files import INDEX, PARTIAL
from coordexp.tasks import ignore

LARGE = 2**24  # bytes of a data file from which on it gets an index file
HEADER = 512  # bytes: a JSON object, and blanks
FORMAT = 1
REPORTED = 5.0  # seconds between two messages about the progress
_OBJECT = re.compile(rb'"desc"\s*:')  # occurs once in each object; inside of a text, its quotes are escaped


@dataclass(frozen=True)
class RecordIndex:
    """The byte at which each record begins, and at the end that at which the file ends; the number of objects of
    each record; the numbers of their lines, or None if no line is blank; and the sha256 of the file."""

    offsets: NDArray[np.uint64]
    counts: NDArray[np.uint32]
    numbers: NDArray[np.uint32] | None
    sha256: str

    def __len__(self) -> int:
        return len(self.counts)

    def line_number(self, index: int) -> int:
        """Return the number of the record's line, from 1."""
        return index + 1 if self.numbers is None else int(self.numbers[index])


def open_index(file: int, path: Path, notify: Callable[[str], None] = ignore) -> RecordIndex:
    """Return the index of a file of records, which is open as the descriptor `file`. For a large file, map the
    index file, or write it. If that is not possible, the index stays in memory, and `notify` gets a warning."""
    identity = _identify(file)
    if identity["size"] < LARGE:
        return _scan(file, path, identity, notify)
    place = path.with_name(path.name + INDEX)
    if (index := _map_index(place, identity)) is not None:
        return index
    with _waiting_for_others(file, path, notify):
        if (index := _map_index(place, identity)) is not None:
            return index
        index = _scan(file, path, identity, notify)
        try:
            _write(place, index, identity)
        except OSError as error:
            notify(
                f"warning: {place} cannot be written ({error.strerror}), so every start reads {path} to its end"
            )
            return index
    return _map_index(place, identity) or index  # mapped pages are shared, those of a scan are not


def _identify(file: int) -> dict[str, int]:
    """Return what changes when a file is changed or replaced."""
    facts = os.fstat(file)
    names = ("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")
    return {name.removeprefix("st_"): getattr(facts, name) for name in names}


@contextmanager
def _waiting_for_others(file: int, path: Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Let one process at a time pass, as far as the file system has locks. Without them, each process reads the
    file by itself."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        notify(f"waiting for another process, which reads {path} for the first time")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _scan(descriptor: int, path: Path, identity: dict[str, int], notify: Callable[[str], None]) -> RecordIndex:
    """Read the whole file once. Raise DataError if its identity has changed at the end."""
    offsets, counts, numbers = array("Q"), array("I"), array("I")
    sha256, offset, number, reported = hashlib.sha256(), 0, 0, time.monotonic()
    with open(descriptor, "rb", buffering=2**20, closefd=False) as file:
        file.seek(0)
        for number, line in enumerate(file, start=1):
            sha256.update(line)
            if line.strip():
                offsets.append(offset)
                counts.append(len(_OBJECT.findall(line)))
                numbers.append(number)
            offset += len(line)
            if number % 10_000 == 0 and time.monotonic() - reported > REPORTED:
                reported = time.monotonic()
                notify(f"reading {path}: {number:,} lines, {offset / identity['size']:.0%}")
    offsets.append(offset)
    if _identify(descriptor) != identity:
        raise DataError(f"{path} was changed while it was read", "start again when the file is complete")
    has_blank_lines = len(numbers) != number
    return RecordIndex(
        np.array(offsets, dtype=np.uint64),
        np.array(counts, dtype=np.uint32),
        np.array(numbers, dtype=np.uint32) if has_blank_lines else None,
        sha256.hexdigest(),
    )


def _write(place: Path, index: RecordIndex, identity: dict[str, int]) -> None:
    """Write the index file, whole or not at all."""
    facts = {"records": len(index), "numbered": index.numbers is not None, "sha256": index.sha256}
    partial = place.with_name(f"{place.name}.{uuid4().hex[:8]}{PARTIAL}")
    try:
        with partial.open("xb") as file:
            file.write(json.dumps({"format": FORMAT, **identity, **facts}).encode().ljust(HEADER))
            for part in (index.offsets, index.counts, index.numbers):
                if part is not None:
                    file.write(part.data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(place)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _map_index(place: Path, identity: dict[str, int]) -> RecordIndex | None:
    """Map an index file into memory. Return None if there is none that can be read and fits the data file."""
    try:
        with place.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(HEADER))
            length = os.fstat(file.fileno()).st_size
            records, numbered = int(header["records"]), bool(header["numbered"])
            size = HEADER + 8 * (records + 1) + 4 * records * (2 if numbered else 1)
            if {name: header.get(name) for name in ("format", *identity)} != {"format": FORMAT, **identity}:
                return None
            if length != size:
                return None
            content = np.memmap(file, mode="r", offset=HEADER, shape=(size - HEADER,))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    end = 8 * (records + 1)
    offsets, rest = content[:end].view(np.uint64), content[end:].view(np.uint32)
    return RecordIndex(offsets, rest[:records], rest[records:] if numbered else None, str(header["sha256"]))
