"""Work in shards: a job on a file of records is cut into equal parts, and any process on any machine may do any
part.

All shards of a job write into one folder:

    00003-of-00016.answers.jsonl  the result of a shard, whole or not at all
    00003-of-00016.json           its manifest, which is written last: a shard with a manifest is finished
    shards.lock                   one byte per shard, locked by the process that works on it

A finished shard is not done again, and one that was killed is. The manifest says what decided the result, so that
results of another model, data file or setting are refused instead of joined.

An import has a shard for every file of its source, and an export one for every 10,000 records.
"""

import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from coordexp.data.addresses import move_address
from coordexp.data.records import check_value, read_records
from coordexp.errors import DataError, UserError, explain
from coordexp.files import write_json, write_parts

LOCKS = "shards.lock"
Command = Literal["predict", "doctor", "import", "export webdataset", "export parquet"]
SUFFIXES: dict[Command, str] = {
    "predict": ".answers.jsonl",
    "doctor": ".facts.jsonl",
    "import": ".records.jsonl",
    "export webdataset": ".records.jsonl",
    "export parquet": ".parquet",
}  # of the results of each command
HASHES = ("model", "data")  # parts of a request that are hashes; an error message does not show their values
SHOWN = 10  # numbers of shards in a message
_FILE = re.compile(r"(\d{5,})-of-(\d{5,})(\.json|\.unfinished\.jsonl)")


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` equal parts of a job. The numbers begin at 0, like those of task arrays."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        if match is None or int(match[1]) >= int(match[2]):
            fix = "write its number, from 0, and how many there are: the shards 0/4, 1/4, 2/4 and 3/4 are all data"
            raise UserError(f"--shard {text} is not a shard", fix)
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def name(self) -> str:
        return f"{self.number:05}-of-{self.count:05}"

    def cut(self, total: int, batch: int = 1) -> range:
        """Return the part of `total` things that this shard has. Parts end where batches end: a model may answer
        an image with other last digits if it is asked together with other images."""
        batches = -(-total // batch)
        begin, end = (batches * number // self.count * batch for number in (self.number, self.number + 1))
        return range(min(begin, total), min(end, total))


@dataclass(frozen=True)
class Manifest:
    """Describes a finished shard and its result. `begin` and `end` bound its part of the data, in records or in
    bytes. `request` has everything that decided the result, and `sha256` is the hash of the result."""

    command: Command
    shard: int
    shards: int
    begin: int
    end: int
    data: str
    request: dict[str, Any]
    counts: dict[str, int] = field(default_factory=dict)
    sha256: str = ""


_MANIFEST = TypeAdapter(Manifest)


def manifest_path(folder: Path, shard: Shard) -> Path:
    return folder / f"{shard.name}.json"


def result_path(folder: Path, shard: Shard, command: Command) -> Path:
    return folder / f"{shard.name}{SUFFIXES[command]}"


def finish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a shard whose result has been written, with the hash of that."""
    shard = Shard(manifest.shard, manifest.shards)
    sha256 = _hash_file(result_path(folder, shard, manifest.command))
    write_json(manifest_path(folder, shard), asdict(replace(manifest, sha256=sha256)))


def make_shard(folder: Path, manifest: Manifest, write: Callable[[Path], dict[str, int]]) -> bool:
    """Make a shard and return True, or False if it was finished before. `write` writes the result to a path, and
    returns the counts that the manifest still lacks."""
    shard = Shard(manifest.shard, manifest.shards)
    with claim(folder, shard):
        if is_finished(folder, shard, manifest.request, manifest.command):
            return False
        counts = write(result_path(folder, shard, manifest.command))
        finish(folder, replace(manifest, counts=counts))
    return True


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_finished(folder: Path, shard: Shard, request: dict[str, Any], command: Command) -> bool:
    """Return True if a shard has a result. Raise DataError if that is the result of another request or command."""
    path = manifest_path(folder, shard)
    if not path.is_file():
        return False
    before = _read_manifest(path)
    check_same_request(path, before.request | {"command": before.command}, request | {"command": command})
    return True


def check_same_request(path: Path, before: Any, request: dict[str, Any]) -> None:
    """Raise DataError, which names the differing parts, unless the file at `path` was made with this request."""
    if before == request:
        return
    before = before if isinstance(before, dict) else {}
    names = sorted(name for name in {*before, *request} if before.get(name) != request.get(name))
    shown = [name for name in names if name not in HASHES]
    values = [f"{name} {before.get(name)!r} is now {request.get(name)!r}" for name in shown]
    raise DataError(
        f"{path} was made with another {' and another '.join(names)}{': ' if values else ''}{', '.join(values)}",
        "give the same as before, or remove the file to start again",
    )


@contextmanager
def claim(folder: Path, shard: Shard) -> Iterator[None]:
    """Keep other processes from working on a shard, as far as the file system has locks. Raise UserError if one
    does. The lock ends with the process, however that ends. Without locks, two processes may do the same work;
    their results are equal."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCKS).open("ab") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, shard.number)
        except (BlockingIOError, PermissionError) as error:
            raise UserError(
                f"another process is working on shard {shard} in {folder}", "wait for it, or end that process"
            ) from error
        except OSError:
            pass  # no locks on this file system
        yield


def has_shards(folder: Path) -> bool:
    """Return True if a shard of this folder was begun."""
    return bool(_find_files(folder))


def _find_files(folder: Path) -> list[re.Match[str]]:
    """Return the names of manifests and of unfinished results, in order."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [match for name in names if (match := _FILE.fullmatch(name))]


@dataclass(frozen=True)
class Survey:
    """How far the shards of a folder are. `begun` are those that are being made or were interrupted."""

    count: int
    finished: dict[int, Manifest]
    begun: frozenset[int]

    @property
    def missing(self) -> list[int]:
        return [number for number in range(self.count) if number not in self.finished]


def survey(folder: Path) -> Survey:
    """Read all manifests of a folder. Raise DataError if it has no shards, or those of several jobs."""
    matches = _find_files(folder)
    counts = sorted({int(match[2]) for match in matches})
    if not counts:
        raise DataError(f"{folder} has no shards", "give the folder that was given to --shard as --out")
    if len(counts) > 1:
        raise DataError(
            f"{folder} has shards of jobs with {' and with '.join(map(str, counts))} shards",
            "remove the files of one job, or give every job a folder of its own",
        )
    finished = {int(match[1]): _read_manifest(folder / match[0]) for match in matches if match[3] == ".json"}
    begun = frozenset(int(match[1]) for match in matches) - finished.keys()
    return Survey(counts[0], finished, begun)


def list_finished(folder: Path) -> list[Manifest]:
    """Return the manifests of all shards, in order. Raise DataError unless every shard of one job is finished."""
    known = survey(folder)
    if known.missing:
        more = f" and {len(known.missing) - SHOWN} more" if len(known.missing) > SHOWN else ""
        numbers = ", ".join(map(str, known.missing[:SHOWN])) + more
        raise DataError(
            f"{folder}: {len(known.missing)} of {known.count} shards are not finished: {numbers}",
            "run the command with --shard again for each of them; what they have already is kept",
        )
    return [known.finished[number] for number in range(known.count)]


def read_finished(folder: Path) -> list[Manifest]:
    """Return what `list_finished` does. Raise DataError unless every result is the one that its shard wrote."""
    manifests, end = list_finished(folder), 0
    for manifest in manifests:
        shard = Shard(manifest.shard, manifest.shards)
        path = manifest_path(folder, shard)
        check_same_request(path, manifest.request, manifests[0].request)
        result = result_path(folder, shard, manifest.command)
        if not result.is_file() or _hash_file(result) != manifest.sha256 or manifest.begin != end:
            raise DataError(
                f"{result} is not what its shard wrote",
                f"remove {path} and run --shard {shard} again",
            )
        end = manifest.end
    return manifests


def join_records(folder: Path, manifests: Sequence[Manifest], to: Path) -> None:
    """Write the records of all shards to one file. `manifests` are those of `read_finished`."""
    with write_parts(to) as write:
        for manifest in manifests:
            path = result_path(folder, Shard(manifest.shard, manifest.shards), manifest.command)
            for _, record in read_records(path):
                image = move_address(record.image, folder, to.parent)
                write(f"{replace(record, image=image).as_json()}\n")


def _read_manifest(path: Path) -> Manifest:
    with explain((OSError, ValueError), str(path), "remove it and run its shard again"):
        return check_value(_MANIFEST, json.loads(path.read_bytes()))
