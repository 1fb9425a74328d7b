"""The dumped examples of a run: which of them a page shows, each with the trace of its training.

A long run dumps more than a page can hold. Steps are taken evenly, with the first and the last; the records that
the run follows come before others, as they show one picture over the steps.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordexp.errors import DataError
from coordexp.inspector.run import read_lines
from coordexp.target.dump import FOLLOWED, FORMAT, TRACE_FORMAT, step_files, trained_file

FOLDER = "dumps"


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
    later = [one for file in _evenly(followed, max(1, most // 2)) for one in _read(file, followed=True)]
    later = later[: most // 2]
    room = max(1, (most - len(later)) // max(1, len(first)))
    files = _evenly(chosen, room)
    others = [one for file in files for one in _read(file, followed=False)][: most - len(later)]
    marked = [replace(one, followed=_record(one) in records) for one in others]
    total = (len(others) if len(files) == len(chosen) else len(chosen) * len(first)) + len(followed)
    return sorted([*marked, *later], key=_moment), max(total, len(marked) + len(later))


def _record(one: Dumped) -> Any:
    return one.whole["place"].get("record")


def _moment(one: Dumped) -> tuple[int, int]:
    place = one.whole["place"]
    return int(place.get("step", 0)), int(place.get("micro", 0))


def _evenly(files: list[Path], most: int) -> list[Path]:
    """At most so many, with the first and the last."""
    if len(files) <= most:
        return files
    if most == 1:
        return files[-1:]
    return [files[round(k * (len(files) - 1) / (most - 1))] for k in range(most)]


def _read(file: Path, *, followed: bool) -> Iterator[Dumped]:
    traces = _traces(file.with_name(trained_file(file.name)))
    for number, whole in enumerate(read_lines(file)):
        where = f"{file}, line {number + 1}"
        if whole.get("format") != FORMAT:
            raise DataError(f"{where}: a dump of format {whole.get('format')}; this version reads {FORMAT}")
        if not isinstance(whole.get("place"), dict):
            raise DataError(f"{where}: not a dumped example (it has no place)")
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
    facts = [(file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file()]
    return f"{len(facts)}-{max(facts, default=(0, 0))[0]}-{sum(size for _, size in facts)}"


def mark_of_dumps(run: Path) -> str:
    return mark(file for folder in _folders(run) for file in folder.glob("*.jsonl"))


def _folders(run: Path) -> tuple[Path, Path]:
    return run / FOLDER, run / FOLDER / FOLLOWED
