"""Read a data file line by line and report on it. Memory grows by two numbers per image.

The function that reads an image file is passed in; without it, image files are not opened.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from coordexp.data.doctor.checks import Problem, check_image, check_record
from coordexp.data.doctor.kinds import KINDS
from coordexp.data.doctor.measures import Classes, CountTokens, Sizes, TokenCount, Tokens
from coordexp.data.doctor.suspicion import Suspicions
from coordexp.data.images import ImageFacts
from coordexp.data.records import Record, parse_record
from coordexp.errors import Finding, Place

EXAMPLES = 5  # kept per finding

ReadImage = Callable[[Path], ImageFacts]


@dataclass(frozen=True)
class DataReport:
    """The findings, errors first, and statistics of the file."""

    file: Path
    records: int
    objects: int
    findings: tuple[Finding, ...]
    classes: Classes
    sizes: Sizes
    tokens: TokenCount | None

    @property
    def errors(self) -> int:
        return sum(finding.count for finding in self.findings if finding.severity == "error")


def examine(
    path: Path,
    *,
    look: ReadImage | None = None,
    count_tokens: CountTokens | None = None,
    max_length: int | None = None,
    notify: Callable[[float], None] | None = None,
) -> DataReport:
    """Report on a data file. `look` reads the facts of an image file. `notify` is called after each line with the
    share of the file that has been read."""
    examination = _Examination(path, look, None if count_tokens is None else Tokens(count_tokens), max_length)
    size, done = max(1, path.stat().st_size), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            done += len(line)
            if notify:
                notify(done / size)
            if line.strip():
                examination.add_line(number, line)
    return examination.report()


class _Examination:
    """The findings and statistics of a file while it is being read."""

    def __init__(self, path: Path, look: ReadImage | None, tokens: Tokens | None, max_length: int | None) -> None:
        self._path, self._look, self._tokens, self._max_length = path, look, tokens, max_length
        self._records = self._objects = 0
        self._counts: dict[str, int] = {}  # by code
        self._places: dict[str, list[Place]] = {}
        self._classes, self._sizes, self._suspicions = Classes(), Sizes(), Suspicions()
        self._paths: dict[int, int] = {}  # from the hash of a path to the first line that has it
        self._contents: dict[int, int] = {}  # from the hash of a content to the first line that has it

    def add_line(self, number: int, line: bytes) -> None:
        try:
            record = parse_record(line)
        except ValueError as error:
            self._add(number, [Problem("broken-line", str(error))])
            return
        self._records += 1
        self._objects += len(record.objects)
        problems = check_record(record)
        self._add(number, problems)
        self._add_image(number, record)
        for measure in (self._classes, self._sizes, self._suspicions):
            measure.add(record)
        if self._tokens and not any(KINDS[problem.code].severity == "error" for problem in problems):
            self._check_length(number, self._tokens.add(record.true_objects()))

    def report(self) -> DataReport:
        if not self._records and not self._counts:
            self._add(None, [Problem("no-records", "nothing to train on")])
        for measure in (self._suspicions, self._classes, self._sizes):
            self._add(None, measure.problems())
        findings = tuple(  # in the order of `KINDS`: errors first, and general problems before those of one object
            Finding(kind.severity, code, kind.problem, kind.fix, self._counts[code], tuple(self._places[code]))
            for code, kind in KINDS.items()
            if code in self._counts
        )
        tokens = self._tokens.count if self._tokens else None
        return DataReport(self._path, self._records, self._objects, findings, self._classes, self._sizes, tokens)

    def _add(self, line: int | None, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self._counts[problem.code] = self._counts.get(problem.code, 0) + 1
            places = self._places.setdefault(problem.code, [])
            if len(places) < EXAMPLES:
                places.append(Place(str(self._path), line, problem.detail))

    def _add_image(self, number: int, record: Record) -> None:
        first = self._paths.setdefault(hash(os.path.normpath(record.image)), number)
        if first != number:
            self._add(number, [Problem("duplicate-image", f"{record.image!r}, as in line {first}")])
        if self._look is None:
            return
        try:
            facts = self._look(self._path.parent / record.image)
        except FileNotFoundError:
            self._add(number, [Problem("image-missing", repr(record.image))])
            return
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
            self._add(number, [Problem("image-unreadable", f"{record.image!r}: {error}")])
            return
        self._add(number, check_image(record, facts))
        twin = self._contents.setdefault(hash(facts.content_hash), number)
        if twin != number and first == number:
            self._add(number, [Problem("duplicate-content", f"{record.image!r}, as in line {twin}")])

    def _check_length(self, number: int, length: int) -> None:
        if self._max_length is not None and length > self._max_length:
            detail = f"{length:,} tokens; at most {self._max_length:,} are allowed"
            self._add(number, [Problem("too-long", detail)])
