"""The dumped examples of a run: which of them a page shows, each with the trace of its training.

A long run dumps more than a page can hold. Steps are taken evenly, with the first and the last; the records that
the run follows come before others, as they show one picture over the steps.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from coordexp.dump_files import FOLDER, FOLLOWED, step_files, trained_file
from coordexp.dumps import FORMAT, TRACE_FORMAT
from coordexp.errors import DataError
from coordexp.inspector.run import read_lines

PLACE = ("step", "micro", "record")
LATEST = 100  # files that may still grow: an example can wait some steps for its row
T = TypeVar("T")


@dataclass(frozen=True)
class Dumped:
    """One line of a dump file. `trained` is what was said of it when it was trained, if it was."""

    where: str  # file and line
    whole: dict[str, Any]
    trained: dict[str, Any] | None
    followed: bool


def dump_files(run: Path) -> tuple[list[Path], list[Path]]:
    """Those of the chosen steps, and those of followed records, in the order of steps."""
    chosen, followed = (list(step_files(folder).values()) for folder in _folders(run))
    return chosen, followed


def choose(run: Path, most: int) -> tuple[list[Dumped], int]:
    """At most `most` examples in the order of steps, and about how many there are."""
    chosen, followed = dump_files(run)
    if not chosen:
        raise DataError(
            f"{run} holds no dumped example\n"
            "  a run with rollouts writes them to RUN/dumps (stage2.dump_every); one on ground truth has none"
        )
    first = list(_read(chosen[0], followed=False))
    records = {_record(one) for one in first}
    share = min(most // 2, max(0, most - 2 * len(first)))  # the first step and the last come before them
    later = [one for file in _evenly(followed, max(1, share)) for one in _read(file, followed=True)]
    later = _evenly(later, share)
    room = max(1, (most - len(later)) // max(1, len(first)))
    files = _evenly(chosen, room)
    read = [one for file in files for one in _read(file, followed=False)]
    others = _evenly(read, most - len(later))
    marked = [replace(one, followed=_record(one) in records) for one in others]
    total = (len(read) if len(files) == len(chosen) else len(chosen) * len(first)) + len(followed)
    return sorted([*marked, *later], key=_moment), max(total, len(marked) + len(later))


def _record(one: Dumped) -> int:
    return int(one.whole["place"]["record"])


def _moment(one: Dumped) -> tuple[int, int]:
    return int(one.whole["place"]["step"]), int(one.whole["place"]["micro"])


def _evenly(files: list[T], most: int) -> list[T]:
    """At most so many, with the first and the last."""
    if len(files) <= most:
        return files
    if most < 2:
        return files[-1:] if most else []
    return [files[round(k * (len(files) - 1) / (most - 1))] for k in range(most)]


def _read(file: Path, *, followed: bool) -> Iterator[Dumped]:
    traces = _traces(file.with_name(trained_file(file.name)))
    for number, whole in enumerate(read_lines(file)):
        where = f"{file}, line {number + 1}"
        if whole.get("format") != FORMAT:
            raise DataError(f"{where}: a dump of format {whole.get('format')}; this version reads {FORMAT}")
        place = whole.get("place")
        if not isinstance(place, dict) or not all(isinstance(place.get(name), int) for name in PLACE):
            raise DataError(f"{where}: not a dumped example (its place has no {', '.join(PLACE)})")
        yield Dumped(where, whole, traces.get(number), followed)


def _traces(file: Path) -> dict[int, dict[str, Any]]:
    """By example. One that was trained again after a resume has two, and the last counts."""
    found = {}
    for number, line in enumerate(read_lines(file), start=1):
        if line.get("format") != TRACE_FORMAT or not isinstance(line.get("example"), int):
            raise DataError(f"{file}, line {number}: not a trace of format {TRACE_FORMAT}")
        found[line["example"]] = line
    return found


def last_step(run: Path) -> int:
    """Of the dumped ones, as the log counts; 0 without any."""
    return max((max(step_files(folder), default=-1) for folder in _folders(run)), default=-1) + 1


def mark(files: Iterable[Path]) -> str:
    """Of what a page is made from: another one when there is more. A file that goes meanwhile does not count."""
    facts = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            facts.append(file.stat())
    return f"{len(facts)}-{max((one.st_mtime_ns for one in facts), default=0)}-{sum(one.st_size for one in facts)}"


def mark_of_dumps(run: Path) -> str:
    """By how many files there are, and by the latest: only to those anything is added."""
    parts = []
    for folder in _folders(run):
        names = sorted(os.listdir(folder)) if folder.is_dir() else []  # noqa: PTH208, ten times as fast
        for kind in ("step-", "trained-"):
            own = [name for name in names if name.startswith(kind)]
            parts.append(f"{len(own)}-{mark(folder / name for name in own[-LATEST:])}")
    return " ".join(parts)


def _folders(run: Path) -> tuple[Path, Path]:
    return run / FOLDER, run / FOLDER / FOLLOWED
