"""A file of records, line by line, to a report. Memory grows by two numbers an image.

How an image is looked at is given from outside; without it, images are not read at all.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from coordexp.data.doctor.checks import Problem, check_image, check_record
from coordexp.data.doctor.kinds import KINDS, Example, Finding
from coordexp.data.doctor.measures import Classes, CountTokens, Sizes, TokenCount, Tokens
from coordexp.data.doctor.suspicion import Suspicions
from coordexp.data.images import ImageFacts
from coordexp.data.records import Record, parse_record

EXAMPLES = 5

Look = Callable[[Path], ImageFacts]


@dataclass(frozen=True)
class Report:
    """Findings, errors first; then what the file is made of."""

    file: Path
    records: int
    objects: int
    findings: tuple[Finding, ...]
    classes: Classes
    sizes: Sizes
    tokens: TokenCount | None

    @property
    def errors(self) -> int:
        return sum(finding.count for finding in self.findings if finding.kind.severity == "error")


def examine(
    path: Path,
    *,
    look: Look | None = None,
    count_tokens: CountTokens | None = None,
    max_length: int | None = None,
    tell: Callable[[float], None] = lambda share: None,
) -> Report:
    """`tell` hears the share of the file that is done."""
    run = _Examination(path, look, None if count_tokens is None else Tokens(count_tokens), max_length)
    size, done = max(1, path.stat().st_size), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            done += len(line)
            tell(done / size)
            if line.strip():
                run.line(number, line)
    return run.report()


class _Examination:
    def __init__(self, path: Path, look: Look | None, tokens: Tokens | None, max_length: int | None) -> None:
        self._path, self._look, self._tokens, self._max_length = path, look, tokens, max_length
        self._records = self._objects = 0
        self._found: dict[str, tuple[int, list[Example]]] = {}
        self._classes, self._sizes, self._suspicions = Classes(), Sizes(), Suspicions()
        self._paths: dict[int, int] = {}  # hash of a path, to its first line
        self._marks: dict[int, int] = {}  # hash of a content, to its first line

    def line(self, number: int, line: bytes) -> None:
        try:
            record = parse_record(line)
        except (ValueError, RecursionError) as error:
            self._add(number, [Problem("broken-line", str(error))])
            return
        self._records += 1
        self._objects += len(record.objects)
        problems = check_record(record)
        self._add(number, problems)
        self._image(number, record)
        for measure in (self._classes, self._sizes, self._suspicions):
            measure.add(record)
        if self._tokens and not any(KINDS[problem.code].severity == "error" for problem in problems):
            self._length(number, self._tokens.add(record.sample().objects))

    def report(self) -> Report:
        if not self._records and not self._found:
            self._add(None, [Problem("no-records", "nothing to train on")])
        for measure in (self._suspicions, self._classes, self._sizes):
            self._add(None, measure.problems())
        codes = [code for code in KINDS if code in self._found]  # errors come first there, the general before all
        findings = tuple(Finding(code, self._found[code][0], tuple(self._found[code][1])) for code in codes)
        tokens = self._tokens.count if self._tokens else None
        return Report(self._path, self._records, self._objects, findings, self._classes, self._sizes, tokens)

    def _add(self, line: int | None, problems: Iterable[Problem]) -> None:
        for problem in problems:
            count, examples = self._found.get(problem.code, (0, []))
            if len(examples) < EXAMPLES:
                examples.append(Example(line, problem.detail))
            self._found[problem.code] = (count + 1, examples)

    def _image(self, number: int, record: Record) -> None:
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
        twin = self._marks.setdefault(hash(facts.mark), number)
        if twin != number and first == number:
            self._add(number, [Problem("duplicate-content", f"{record.image!r}, as in line {twin}")])

    def _length(self, number: int, length: int) -> None:
        if self._max_length is not None and length > self._max_length:
            self._add(number, [Problem("too-long", f"{length:,} tokens, at most {self._max_length:,} fit")])
