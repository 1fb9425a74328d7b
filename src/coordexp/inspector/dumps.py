"""Choosing the dumped examples of a run that a page shows, each with the trace of its training.

A long run dumps more than a page can hold. Steps are chosen evenly and include the first and the last. Records
that the run follows have priority, because they show one image over the steps.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from coordexp.dumps import FOLDER, FOLLOWED, FORMAT, TRACE_FORMAT, step_files, trace_file
from coordexp.errors import DataError
from coordexp.inspector.run import read_lines

PLACE = ("step", "micro", "record")
GROWING_FILES = 100  # the latest files, which may still grow: an example can wait some steps for its row
T = TypeVar("T")


@dataclass(frozen=True)
class DumpedExample:
    """One line of a dump file. `trained` is the trace of its training, None if it was not trained yet."""

    where: str  # file and line
    content: dict[str, Any]
    trained: dict[str, Any] | None
    followed: bool

    @property
    def record(self) -> int:
        return int(self.content["place"]["record"])

    @property
    def time(self) -> tuple[int, int]:
        """Step and micro-step."""
        return int(self.content["place"]["step"]), int(self.content["place"]["micro"])


def choose_examples(run: Path, most: int) -> tuple[list[DumpedExample], int]:
    """Return at most `most` examples in the order of steps, and approximately how many there are."""
    regular, followed = (list(step_files(folder).values()) for folder in _folders(run))
    if not regular:
        raise DataError(
            f"{run} has no dumped examples",
            "a run with rollouts writes them to RUN/dumps (stage2.dump_every); one on the ground truth has none",
        )
    first = list(_read(regular[0], followed=False))
    records = {example.record for example in first}
    share = min(most // 2, max(0, most - 2 * len(first)))  # the first step and the last have priority
    repeated = [example for file in _spread(followed, max(1, share)) for example in _read(file, followed=True)]
    repeated = _spread(repeated, share)
    room = max(1, (most - len(repeated)) // max(1, len(first)))
    files = _spread(regular, room)
    read = [example for file in files for example in _read(file, followed=False)]
    others = [
        replace(example, followed=example.record in records) for example in _spread(read, most - len(repeated))
    ]
    total = (len(read) if len(files) == len(regular) else len(regular) * len(first)) + len(followed)
    chosen = sorted([*others, *repeated], key=attrgetter("time"))
    return chosen, max(total, len(chosen))


def _spread(items: list[T], most: int) -> list[T]:
    """Return at most `most` items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return items
    if most < 2:
        return items[-1:] if most else []
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def _read(file: Path, *, followed: bool) -> Iterator[DumpedExample]:
    traces = _read_traces(file.with_name(trace_file(file.name)))
    for number, content in enumerate(read_lines(file)):
        where = f"{file}, line {number + 1}"
        if content.get("format") != FORMAT:
            raise DataError(f"{where}: a dump of format {content.get('format')}; this version reads {FORMAT}")
        place = content.get("place")
        if not isinstance(place, dict) or not all(isinstance(place.get(name), int) for name in PLACE):
            raise DataError(f"{where}: not a dumped example (its place has no {', '.join(PLACE)})")
        yield DumpedExample(where, content, traces.get(number), followed)


def _read_traces(file: Path) -> dict[int, dict[str, Any]]:
    """Return the traces by the number of the example. An example that was trained again after a resume has two;
    the last one counts."""
    traces = {}
    for number, line in enumerate(read_lines(file), start=1):
        if line.get("format") != TRACE_FORMAT or not isinstance(line.get("example"), int):
            raise DataError(f"{file}, line {number}: not a trace of format {TRACE_FORMAT}")
        traces[line["example"]] = line
    return traces


def last_dumped_step(run: Path) -> int:
    """Return the last dumped step, as the log counts; 0 without any."""
    return max((max(step_files(folder), default=-1) for folder in _folders(run)), default=-1) + 1


def compute_stamp(files: Iterable[Path]) -> str:
    """Return a text that changes when a file is added or grows. A file that disappears meanwhile is ignored."""
    stats = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            stats.append(file.stat())
    modified = max((stat.st_mtime_ns for stat in stats), default=0)
    return f"{len(stats)}-{modified}-{sum(stat.st_size for stat in stats)}"


def compute_dump_stamp(run: Path) -> str:
    """Return a text that changes when a run dumps more: the number of files, and the stamp of those that grow."""
    parts = []
    for folder in _folders(run):
        names = sorted(os.listdir(folder)) if folder.is_dir() else []  # noqa: PTH208, ten times as fast
        for kind in ("step-", "trained-"):
            files = [name for name in names if name.startswith(kind)]
            parts.append(f"{len(files)}-{compute_stamp(folder / name for name in files[-GROWING_FILES:])}")
    return " ".join(parts)


def _folders(run: Path) -> tuple[Path, Path]:
    return run / FOLDER, run / FOLDER / FOLLOWED
