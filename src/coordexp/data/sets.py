"""Data sets of several files: random access to all of their records, as if the files were one."""

import hashlib
import json
import resource
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from coordexp.data.index import open_indices
from coordexp.data.records import AnyRecord, ChatRecord, Record, RecordFile, parse_any_record
from coordexp.errors import DataError
from coordexp.tasks import ignore

OPEN_SHARE = 4  # a set keeps a fourth of the files open that a process may, and a run has several sets


class RecordSet:
    """Random access to the records of several files or data sets, one after the other. `parts` are these files or
    data sets, and `files` all files of all parts."""

    def __init__(self, parts: Sequence["Records"]) -> None:
        self.parts = tuple(parts)
        self.files: tuple[RecordFile, ...] = tuple(file for part in parts for file in part.files)
        self._starts = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Record:
        file, number = self.locate(index)
        return file[number]

    def read(self, index: int) -> AnyRecord:
        """Return a record of either kind."""
        file, number = self.locate(index)
        return file.read(number)

    def __str__(self) -> str:
        others = len(self.files) - 1
        return f"{self.files[0]} and {others} more file{'s' if others > 1 else ''}"

    @property
    def object_counts(self) -> NDArray[np.uint32]:
        """The number of objects of each record."""
        return np.concatenate([file.object_counts for file in self.files])

    @property
    def sha256(self) -> str:
        """The hash of the hashes of all files."""
        return hashlib.sha256("\n".join(file.sha256 for file in self.files).encode()).hexdigest()

    def locate(self, index: int) -> tuple[RecordFile, int]:
        """Return the file that has a record, and the number of the record in this file, from 0."""
        part, number = self.find_part(index)
        return self.parts[part].locate(number)

    def find_part(self, index: int) -> tuple[int, int]:
        """Return the number of the part that has a record, and that of the record in this part, both from 0."""
        index = range(len(self))[index]
        part = bisect_right(self._starts, index) - 1
        return part, index - self._starts[part]

    def read_with_image_id(self, index: int) -> tuple[int, Record]:
        """Return a record with the number that names its image in predictions: its `image_id`, or else its own
        number in the data set, from 1. Lines of different files have the same numbers."""
        record = self[index]
        return index + 1 if record.image_id is None else record.image_id, record


Records: TypeAlias = RecordFile | RecordSet


def find_wrong_kind(setting: str, records: Iterable[AnyRecord], trains_chat: bool) -> tuple[str, str] | None:
    """Return the problem and the fix if the data of a setting has records of a kind that does not belong there.
    `trains_chat` is True if the objective of the run trains on chat records."""
    has_chat = {isinstance(record, ChatRecord) for record in records}
    if setting.startswith("custom.eval_data"):
        if False in has_chat:
            return "it has records with objects, and evaluation asks questions", "name it in custom.val_jsonl"
    elif True in has_chat and setting == "custom.val_jsonl":
        return "it has questions and answers, and evaluation needs objects", "name it in custom.eval_data"
    elif True in has_chat and not trains_chat:
        fix = "declare the module chat_ce in the objective (docs/training.md), or remove such records"
        return "it has questions and answers, which no loss of this run trains on", fix
    return None


def open_data(sets: Sequence[Sequence[Path]], notify: Callable[[str], None] = ignore) -> Records:
    """Open the files of one or more data sets. Several sets are joined to one `RecordSet`, whose `parts` they
    are. A single file is opened as such. Empty files are left out, unless all files of a set are empty. If there
    are many files for what a process may have open, a file is opened for each record that is read. `notify` gets
    messages while large files are read for the first time."""
    stays_open = sum(map(len, sets)) <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // OPEN_SHARE

    def open_set(paths: Sequence[Path]) -> Records:
        indices = list(zip(paths, open_indices(paths, notify), strict=True))
        with_records = [(path, index) for path, index in indices if len(index)]
        return _join([RecordFile(path, notify, index, stays_open) for path, index in with_records or indices])

    return _join([open_set(paths) for paths in sets])


def locate_image(files: Sequence[RecordFile], address: str) -> str:
    """Return the file and the line of the first record with an image, such as `train.jsonl:40`, or nothing. The
    files are searched line by line, so this is for errors only."""
    name = address.rpartition("/")[2]
    spellings = {name.encode("utf-8", "surrogateescape"), json.dumps(name)[1:-1].encode()}
    for file in files:
        with file.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if any(spelling in line for spelling in spellings):
                    with suppress(ValueError):
                        record = parse_any_record(line)
                        if record.image is not None and file.image_address(record) == address:
                            return f"{file}:{number}"
    return ""


def list_addresses(records: Records, indices: Iterable[int]) -> list[str]:
    """Return the addresses of the images of some records, to be read ahead. A broken record is left out: whoever
    trains on it will say what is wrong with it."""
    addresses = []
    for index in indices:
        file, number = records.locate(index)
        with suppress(DataError):
            record = file.read(number)
            if record.image is not None:
                addresses.append(file.image_address(record))
    return addresses


def _join(parts: Sequence[Records]) -> Records:
    return parts[0] if len(parts) == 1 else RecordSet(parts)
