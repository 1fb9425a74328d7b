"""Read a data file line by line and report on it: problems, classes, sizes of objects, tokens of answers. Memory
grows by two numbers per image.

The function that reads an image file is passed in; without it, image files are not opened.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from coordexp.data.doctor.checks import KINDS, Problem, Suspicions, check_image, check_record
from coordexp.data.geometry import BINS, TrueObject
from coordexp.data.images import ImageFacts
from coordexp.data.records import Record, parse_record
from coordexp.errors import Finding, Place

MOST_CLASSES = 100_000  # counted by name, to bound the memory: free text may describe every object differently
EXAMPLES = 5  # kept per finding
ReadImage = Callable[[Path], ImageFacts]
# A function that counts the tokens of the answer with these objects.
CountTokens = Callable[[Sequence[TrueObject]], int]
STEPS = (0, 5, 10, 20, 50, 100, 200, 500, BINS)  # of the histogram of sides
SMALL = 20  # bins; below this median side, the masks of matching are too coarse


class Classes:
    """How many objects each class has. `uncounted` are the objects of classes beyond `MOST_CLASSES`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.uncounted = 0

    def add(self, record: Record) -> None:
        for item in record.objects:
            if item.desc in self.counts or len(self.counts) < MOST_CLASSES:
                self.counts[item.desc] += 1
            else:
                self.uncounted += 1

    def problems(self) -> Iterator[Problem]:
        spellings: dict[str, list[str]] = {}
        for desc in self.counts:
            spellings.setdefault(" ".join(desc.casefold().split()), []).append(desc)
        for variants in spellings.values():
            if len(variants) > 1:
                shown = [f"{desc!r} ({self.counts[desc]:,})" for desc in variants[:4]]
                yield Problem("desc-spelling", ", ".join(shown))


class Sizes:
    """How many objects have which side, in bins. The side is the square root of width times height."""

    def __init__(self) -> None:
        self.sides = [0] * BINS

    def add(self, record: Record) -> None:
        scale = (BINS - 1) / math.sqrt(record.extent[0] * record.extent[1])
        for item in record.objects:
            xs, ys = item.coords[::2], item.coords[1::2]
            side = scale * math.sqrt((max(xs) - min(xs)) * (max(ys) - min(ys)))
            self.sides[min(BINS - 1, round(side))] += 1

    @property
    def median(self) -> int | None:
        return quantile(Counter(dict(enumerate(self.sides))), 0.5)

    @property
    def histogram(self) -> tuple[tuple[int, int, int], ...]:
        """The number of objects per range of sides, as (lowest side, end of the range, objects)."""
        return tuple((low, high, sum(self.sides[low:high])) for low, high in pairwise(STEPS))

    def problems(self) -> Iterator[Problem]:
        if self.median is not None and self.median < SMALL:
            yield Problem("small-objects", f"median side {self.median} of {BINS:,} bins")


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens per answer: median, 95th percentile and maximum."""

    records: int
    per_object: float
    median: int
    p95: int
    longest: int


class Tokens:
    """Lengths of the answers as they are trained on, with the end of the turn, without image and prompt."""

    def __init__(self, count_tokens: CountTokens) -> None:
        self._count_tokens = count_tokens
        self._lengths: Counter[int] = Counter()
        self._objects = 0

    def add(self, objects: Sequence[TrueObject]) -> int:
        """Count the answer with these objects and return its length."""
        length = self._count_tokens(objects)
        self._lengths[length] += 1
        self._objects += len(objects)
        return length

    @property
    def count(self) -> TokenCount | None:
        median, p95 = quantile(self._lengths, 0.5), quantile(self._lengths, 0.95)
        if median is None or p95 is None:
            return None
        total = sum(length * count for length, count in self._lengths.items())
        records = self._lengths.total()
        return TokenCount(records, round(total / max(1, self._objects), 1), median, p95, max(self._lengths))


def quantile(counts: Counter[int], share: float) -> int | None:
    """Return the smallest value that at least this share of the counted values does not exceed, or None if nothing
    was counted."""
    needed, passed = share * counts.total(), 0
    for value in sorted(value for value, count in counts.items() if count):
        passed += counts[value]
        if passed >= needed:
            return value
    return None


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
            replace(kind, count=self._counts[code], places=tuple(self._places[code]))
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
