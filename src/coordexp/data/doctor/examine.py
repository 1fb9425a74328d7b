"""Read a data file line by line and report on it: problems, classes, sizes of objects, tokens of answers. Memory
grows by two numbers per image.

The file is read in parts, by several processes if they are allowed. The facts about the parts are then merged in
the order of the file. The function that reads an image file is passed in; without it, image files are not opened.
"""

import math
import multiprocessing
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from coordexp.data.addresses import join_address
from coordexp.data.doctor.checks import KINDS, Problem, Suspicions, check_image, check_record
from coordexp.data.geometry import BINS
from coordexp.data.images import ImageFacts, size_problem
from coordexp.data.records import AnyRecord, ChatRecord, Record, open_records, parse_any_record
from coordexp.errors import DataError, Finding, Place
from coordexp.tasks import ignore

T = TypeVar("T")
MOST_CLASSES = 100_000  # counted by name, to bound the memory: free text may describe every object differently
EXAMPLES = 5  # kept per finding
MIXED = 0.05  # share of the rarer kind of shape from which a class counts as mixed
PART = 2**18  # bytes of a part of the file, about a tenth of a second of work, so that all processes end together
ReadImage = Callable[[str], ImageFacts]  # takes an address
STEPS = (0, 5, 10, 20, 50, 100, 200, 500, BINS)  # of the histogram of sides
SMALL = 20  # bins; below this median side, the masks of matching are too coarse


class ExampleTokens(NamedTuple):
    """The tokens of an example: those of its prompt, with those of its image, or None if only answers are counted,
    and those of its answer, with the end of the turn."""

    prompt: int | None
    answer: int


# A function that counts the tokens of the example of a record. It raises ValueError if there can be none.
CountTokens = Callable[[AnyRecord], ExampleTokens]


class Classes:
    """How many objects each class has, and how many of them are boxes. `uncounted` are the objects of classes
    beyond `MOST_CLASSES`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.boxes: Counter[str] = Counter()
        self.uncounted = 0

    def add(self, record: Record) -> None:
        for item in record.objects:
            if item.desc in self.counts or len(self.counts) < MOST_CLASSES:
                self.counts[item.desc] += 1
                self.boxes[item.desc] += item.kind == "bbox_2d"
            else:
                self.uncounted += 1

    def merge(self, other: "Classes") -> None:
        self.uncounted += other.uncounted
        for desc, count in other.counts.items():
            if desc in self.counts or len(self.counts) < MOST_CLASSES:
                self.counts[desc] += count
                self.boxes[desc] += other.boxes[desc]
            else:
                self.uncounted += count

    def problems(self) -> Iterator[Problem]:
        for desc, count in self.counts.items():
            polygons = count - self.boxes[desc]
            if min(self.boxes[desc], polygons) >= max(1, MIXED * count):
                yield Problem("mixed-shapes", f"{desc!r}: {self.boxes[desc]:,} boxes and {polygons:,} polygons")
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

    def merge(self, other: "Sizes") -> None:
        self.sides = [*map(sum, zip(self.sides, other.sides, strict=True))]

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
    """Tokens per answer or per example: median, 95th percentile and maximum. `per_object` is the number of all
    tokens by that of all objects."""

    records: int
    per_object: float
    median: int
    p95: int
    longest: int


class Tokens:
    """Lengths of answers as they are trained on, or of whole examples."""

    def __init__(self) -> None:
        self._lengths: Counter[int] = Counter()
        self._totals: Counter[str] = Counter()  # of the records with objects

    def add(self, length: int, objects: int | None) -> None:
        """Add a length with so many objects, or None if it is that of a question and its answer."""
        self._lengths[length] += 1
        if objects is not None:
            self._totals.update(objects=objects, tokens=length)

    def merge(self, other: "Tokens") -> None:
        self._lengths.update(other._lengths)
        self._totals.update(other._totals)

    @property
    def count(self) -> TokenCount | None:
        median, p95 = quantile(self._lengths, 0.5), quantile(self._lengths, 0.95)
        if median is None or p95 is None:
            return None
        per_object = round(self._totals["tokens"] / max(1, self._totals["objects"]), 1)
        return TokenCount(self._lengths.total(), per_object, median, p95, max(self._lengths))


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
    """The findings, errors first, and statistics of the file. `questions` are the chat records among its records.
    `tokens` are those of answers, and `examples` those of whole examples, with prompt and image."""

    file: Path
    records: int
    questions: int
    objects: int
    findings: tuple[Finding, ...]
    classes: Classes
    sizes: Sizes
    tokens: TokenCount | None
    examples: TokenCount | None

    @property
    def errors(self) -> int:
        return sum(finding.count for finding in self.findings if finding.severity == "error")


# An image as a record uses it: line, path, hash of the path, and hash of the content, or None if it was not read.
# The request of the record is a part of both hashes: an image with another request is not a duplicate. The hashes
# are those of this process and its forks. Tuples of numbers and texts are sent quickly.
ImageUse = tuple[int, str, int, int | None]


@dataclass
class Facts:
    """The findings and statistics of a part of a file, or of the whole. Lines are numbered from 1 in each part."""

    lines: int = 0
    records: int = 0
    questions: int = 0
    objects: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # of problems, by code
    places: dict[str, list[tuple[int | None, str]]] = field(default_factory=dict)  # the first ones of each code
    images: list[ImageUse] = field(default_factory=list)
    classes: Classes = field(default_factory=Classes)
    sizes: Sizes = field(default_factory=Sizes)
    suspicions: Suspicions = field(default_factory=Suspicions)
    tokens: Tokens = field(default_factory=Tokens)
    example_tokens: Tokens = field(default_factory=Tokens)

    def add(self, line: int | None, problem: Problem) -> None:
        self.counts[problem.code] += 1
        self._add_place(problem.code, line, problem.detail)

    def _add_place(self, code: str, line: int | None, detail: str) -> None:
        places = self.places.setdefault(code, [])
        if len(places) < EXAMPLES:
            places.append((line, detail))

    def merge(self, part: "Facts") -> None:
        """Add the facts about the part of the file behind this one, except for its images."""
        for code, places in part.places.items():
            for line, detail in places:
                self._add_place(code, None if line is None else self.lines + line, detail)
        self.lines += part.lines
        self.records += part.records
        self.questions += part.questions
        self.objects += part.objects
        self.counts.update(part.counts)
        self.classes.merge(part.classes)
        self.sizes.merge(part.sizes)
        self.suspicions.merge(part.suspicions)
        self.tokens.merge(part.tokens)
        self.example_tokens.merge(part.example_tokens)


@dataclass(frozen=True)
class _PartReader:
    """Reads parts of a file."""

    folder: Path
    look: ReadImage | None
    count_tokens: CountTokens | None
    max_length: int | None

    def read(self, lines: Iterator[bytes]) -> Facts:
        facts = Facts()
        for line in lines:
            facts.lines += 1
            if line.strip():
                try:
                    record = parse_any_record(line)
                except ValueError as error:
                    facts.add(facts.lines, Problem("broken-line", str(error)))
                else:
                    self._add_record(facts, record)
        return facts

    def _add_record(self, facts: Facts, record: AnyRecord) -> None:
        facts.records += 1
        problems = check_record(record)
        seen, of_image = look_at_image(self.folder, record, self.look)
        for problem in (*problems, *of_image):
            facts.add(facts.lines, problem)
        if isinstance(record, ChatRecord):
            facts.questions += 1
        else:
            facts.objects += len(record.objects)
            request = (record.classes, record.expression, record.prompt)
            content = None if seen is None else hash((seen.content_hash, request))
            path_hash = hash((os.path.normpath(record.image), request))
            facts.images.append((facts.lines, record.image, path_hash, content))
            facts.classes.add(record)
            facts.sizes.add(record)
            facts.suspicions.add(record)
        if self.count_tokens and not any(KINDS[problem.code].severity == "error" for problem in problems):
            self._add_length(facts, record, self.count_tokens)

    def _add_length(self, facts: Facts, record: AnyRecord, count_tokens: CountTokens) -> None:
        """Count the tokens of a record's example. It is a problem if it is too long, or if there can be none."""
        try:
            prompt, answer = count_tokens(record)
        except ValueError as error:
            facts.add(facts.lines, Problem("not-writable", str(error)))
            return
        objects = None if isinstance(record, ChatRecord) else len(record.asked_objects)
        facts.tokens.add(answer, objects)
        length = answer + (prompt or 0)
        if prompt is not None:
            facts.example_tokens.add(length, objects)
        if self.max_length is not None and length > self.max_length:
            parts = "" if prompt is None else f", {answer:,} of them the answer"
            detail = f"{length:,} tokens{parts}; at most {self.max_length:,} are allowed"
            facts.add(facts.lines, Problem("too-long", detail))


def look_at_image(
    folder: Path, record: AnyRecord, look: ReadImage | None
) -> tuple[ImageFacts | None, tuple[Problem, ...]]:
    """Return the facts of the image of a record, and what is wrong with it. Without `look`, or without an image,
    there are neither."""
    if look is None or record.image is None:
        return None, ()
    try:
        image = look(join_address(folder, record.image))
    except FileNotFoundError:
        return None, (Problem("image-missing", repr(record.image)),)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        if size_problem(record.width, record.height):
            return None, ()  # `check_record` has reported this size
        return None, (Problem("image-unreadable", f"{record.image!r}: {error}"),)
    return image, check_image(record, image)


def examine(
    path: Path,
    *,
    look: ReadImage | None = None,
    count_tokens: CountTokens | None = None,
    max_length: int | None = None,
    notify: Callable[[float], None] = ignore,
    processes: int = 1,
    part: int = PART,
) -> DataReport:
    """Report on a data file. `look` reads the facts of an image file. `max_length` is the largest number of tokens
    of an example, as far as they are counted. `notify` is called with the share of the file that has been read.
    Several `processes` read parts of the file, of about `part` bytes, side by side; the report is the same."""
    reader, whole = _PartReader(path.parent, look, count_tokens, max_length), Facts()
    paths, contents = dict[int, int](), dict[int, int]()  # from the hash of each to the first line that has it
    for facts in read_parts(path, reader.read, processes, notify, part):
        for line, image, path_hash, content in facts.images:
            line += whole.lines
            first = paths.setdefault(path_hash, line)
            twin = line if content is None else contents.setdefault(content, line)
            if first != line:
                whole.add(line, Problem("duplicate-image", f"{image!r}, as in line {first}"))
            elif twin != line:
                whole.add(line, Problem("duplicate-content", f"{image!r}, as in line {twin}"))
        whole.merge(facts)
    if not whole.records and not whole.counts:
        whole.add(None, Problem("no-records", "nothing to train on"))
    for problem in (*whole.suspicions.problems(), *whole.classes.problems(), *whole.sizes.problems()):
        whole.add(None, problem)
    findings = []
    for code, kind in KINDS.items():  # errors first, and general problems before those of one object
        if code in whole.counts:
            places = tuple(Place(str(path), *place) for place in whole.places[code])
            findings.append(replace(kind, count=whole.counts[code], places=places))
    return DataReport(
        path,
        whole.records,
        whole.questions,
        whole.objects,
        tuple(findings),
        whole.classes,
        whole.sizes,
        whole.tokens.count,
        whole.example_tokens.count,
    )


def read_parts(
    path: Path,
    work: Callable[[Iterator[bytes]], T],
    processes: int,
    notify: Callable[[float], None],
    part: int = PART,
) -> Iterator[T]:
    """Yield what `work` returns for the lines of each part of a file, in order. Parts have about `part` bytes, and
    several `processes` read them side by side. `notify` gets the share of the file that has been read."""
    parts, begin, size = list[tuple[int, int]](), 0, path.stat().st_size
    with open_records(path) as file:
        while begin < size:
            file.seek(min(begin + part, size))
            file.readline()
            parts.append((begin, file.tell()))
            begin = file.tell()

    def read(bounds: tuple[int, int]) -> T:
        return work(_read_lines(path, *bounds))

    processes = min(processes, len(parts)) if sys.platform == "linux" else 1
    results = map(read, parts) if processes <= 1 else _map_in_processes(read, parts, processes)
    for (_, end), result in zip(parts, results, strict=True):
        yield result
        notify(end / size)


def _read_lines(path: Path, begin: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(begin)
        while file.tell() < end:
            line = file.readline()
            if not line:
                raise DataError(f"{path} was changed while it was read", "start again when it is complete")
            yield line


def _map_in_processes(
    work: Callable[[tuple[int, int]], T], parts: Sequence[tuple[int, int]], processes: int
) -> Iterator[T]:
    """Yield the results of all parts, in order. A few parts are read ahead. The processes are forks of this one,
    so `work` need not be sent to them."""
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, context, initializer=_begin_worker, initargs=(work,))
    waiting: deque[Future[T]] = deque()
    try:
        for part in parts:
            waiting.append(pool.submit(_work_in_process, part))
            if len(waiting) == 4 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        problem = "a process that read a part of the file was killed, most likely because memory ran out"
        raise DataError(problem, "end other programs, or allow one processor only (taskset -c 0)") from error
    finally:
        pool.shutdown(cancel_futures=True)


_work: Callable[[tuple[int, int]], Any]  # of this worker process


def _begin_worker(work: Callable[[tuple[int, int]], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all processes; the first one ends the others


def _work_in_process(part: tuple[int, int]) -> Any:
    return _work(part)
