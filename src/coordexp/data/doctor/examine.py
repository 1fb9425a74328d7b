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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from coordexp.data.doctor.checks import KINDS, Problem, Suspicions, check_chat, check_image, check_record
from coordexp.data.geometry import BINS
from coordexp.data.images import ImageFacts, size_problem
from coordexp.data.records import AnyRecord, ChatRecord, Record, open_records, parse_any_record
from coordexp.errors import DataError, Finding, Place

MOST_CLASSES = 100_000  # counted by name, to bound the memory: free text may describe every object differently
EXAMPLES = 5  # kept per finding
MIXED = 0.05  # share of the rarer kind of shape from which a class counts as mixed
PART = 2**18  # bytes of a part of the file, about a tenth of a second of work, so that all processes end together
ReadImage = Callable[[Path], ImageFacts]
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
        self._objects = self._tokens_of_objects = 0

    def add(self, length: int, objects: int | None) -> None:
        """Add a length with so many objects, or None if it is that of a question and its answer."""
        self._lengths[length] += 1
        if objects is not None:
            self._objects += objects
            self._tokens_of_objects += length

    def merge(self, other: "Tokens") -> None:
        self._lengths.update(other._lengths)
        self._objects += other._objects
        self._tokens_of_objects += other._tokens_of_objects

    @property
    def count(self) -> TokenCount | None:
        median, p95 = quantile(self._lengths, 0.5), quantile(self._lengths, 0.95)
        if median is None or p95 is None:
            return None
        per_object = round(self._tokens_of_objects / max(1, self._objects), 1)
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


def examine(
    path: Path,
    *,
    look: ReadImage | None = None,
    count_tokens: CountTokens | None = None,
    max_length: int | None = None,
    notify: Callable[[float], None] | None = None,
    processes: int = 1,
    part: int = PART,
) -> DataReport:
    """Report on a data file. `look` reads the facts of an image file. `max_length` is the largest number of tokens
    of an example, as far as they are counted. `notify` is called with the share of the file that has been read.
    Several `processes` read parts of the file, of about `part` bytes, side by side; the
    report is the same."""
    reader = _PartReader(path, look, count_tokens, max_length)
    whole, parts, size = _Examination(path), list(split_file(path, part)), max(1, path.stat().st_size)
    with map_parts(reader.read, min(processes, len(parts))) as read_parts:
        for (_, end), facts in zip(parts, read_parts(parts), strict=True):
            whole.merge(facts)
            if notify:
                notify(end / size)
    return whole.report()


def split_file(path: Path, part: int = PART) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file: the offsets of their first byte and of their end, which is behind a newline."""
    begin, size = 0, path.stat().st_size
    with open_records(path) as file:
        while begin < size:
            file.seek(min(begin + part, size))
            file.readline()
            yield begin, file.tell()
            begin = file.tell()


def read_lines(path: Path, part: tuple[int, int]) -> Iterator[bytes]:
    """Yield the lines of a part of a file."""
    begin, end = part
    with path.open("rb") as file:
        file.seek(begin)
        while file.tell() < end:
            line = file.readline()
            if not line:
                raise DataError(f"{path} was changed while it was read", "start again when it is complete")
            yield line


@contextmanager
def map_parts(work: Callable[[tuple[int, int]], Any], processes: int) -> Iterator[Callable[..., Any]]:
    """Yield a function like `map`, which calls `work` in several processes. They are forks of this one, so that
    `work` need not be sent to them."""
    if processes <= 1 or sys.platform != "linux":
        yield partial(map, work)
        return
    start = partial(_begin_worker, work)
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), initializer=start)
    try:
        yield partial(_map_in_order, pool, 4 * processes)
    except BrokenProcessPool as error:
        problem = "a process that read a part of the file was killed, most likely because memory ran out"
        raise DataError(problem, "end other programs, or allow one processor only (taskset -c 0)") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _map_in_order(pool: ProcessPoolExecutor, ahead: int, parts: Iterable[tuple[int, int]]) -> Iterator[Any]:
    """Yield the results of the parts in order. At most `ahead` parts are read before they are taken."""
    waiting: deque[Future[Any]] = deque()
    for part in parts:
        waiting.append(pool.submit(_work_in_process, part))
        if len(waiting) == ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


_work: Callable[[tuple[int, int]], Any] | None = None  # of this worker process


def _begin_worker(work: Callable[[tuple[int, int]], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all processes; the first one ends the others


def _work_in_process(part: tuple[int, int]) -> Any:
    assert _work is not None
    return _work(part)


# An image as a record uses it: line, path, hash of the path, and hash of the content, or None if it was not read.
# The request of the record is a part of both hashes: an image with another request is not a duplicate. The hashes
# are those of this process and its forks. Tuples of numbers and texts are sent quickly.
ImageUse = tuple[int, str, int, int | None]


def _describe_use(line: int, record: Record, content: int | None) -> ImageUse:
    request = (record.classes, record.expression, record.prompt)
    path_hash = hash((os.path.normpath(record.image), request))
    return line, record.image, path_hash, None if content is None else hash((content, request))


@dataclass
class PartFacts:
    """The findings and statistics of a part of a file. Lines are numbered from 1 in each part."""

    lines: int = 0
    records: int = 0
    questions: int = 0
    objects: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # of problems, by code
    examples: list[tuple[int, Problem]] = field(default_factory=list)  # the first ones of each code
    images: list[ImageUse] = field(default_factory=list)
    classes: Classes = field(default_factory=Classes)
    sizes: Sizes = field(default_factory=Sizes)
    suspicions: Suspicions = field(default_factory=Suspicions)
    tokens: Tokens = field(default_factory=Tokens)
    example_tokens: Tokens = field(default_factory=Tokens)

    def add_problems(self, line: int, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self.counts[problem.code] += 1
            if self.counts[problem.code] <= EXAMPLES:
                self.examples.append((line, problem))


@dataclass(frozen=True)
class _PartReader:
    """Reads parts of a file."""

    path: Path
    look: ReadImage | None
    count_tokens: CountTokens | None
    max_length: int | None

    def read(self, part: tuple[int, int]) -> PartFacts:
        facts = PartFacts()
        for line in read_lines(self.path, part):
            facts.lines += 1
            if line.strip():
                self._add_line(facts, line)
        return facts

    def _add_line(self, facts: PartFacts, line: bytes) -> None:
        try:
            record = parse_any_record(line)
        except ValueError as error:
            facts.add_problems(facts.lines, [Problem("broken-line", str(error))])
            return
        facts.records += 1
        problems = check_chat(record) if isinstance(record, ChatRecord) else check_record(record)
        facts.add_problems(facts.lines, problems)
        content = self._read_image(facts, record, record.image) if record.image is not None else None
        if isinstance(record, ChatRecord):
            facts.questions += 1
        else:
            facts.objects += len(record.objects)
            facts.images.append(_describe_use(facts.lines, record, content))
            for measure in (facts.classes, facts.sizes, facts.suspicions):
                measure.add(record)
        if self.count_tokens and not any(KINDS[problem.code].severity == "error" for problem in problems):
            facts.add_problems(facts.lines, self._add_length(facts, record, self.count_tokens))

    def _add_length(self, facts: PartFacts, record: AnyRecord, count_tokens: CountTokens) -> Iterator[Problem]:
        """Count the tokens of a record's example. Yield a problem if it is too long, or if there can be none."""
        try:
            prompt, answer = count_tokens(record)
        except ValueError as error:
            yield Problem("not-writable", str(error))
            return
        objects = None if isinstance(record, ChatRecord) else len(record.asked_objects)
        facts.tokens.add(answer, objects)
        length = answer + (prompt or 0)
        if prompt is not None:
            facts.example_tokens.add(length, objects)
        if self.max_length is not None and length > self.max_length:
            parts = "" if prompt is None else f", {answer:,} of them the answer"
            yield Problem("too-long", f"{length:,} tokens{parts}; at most {self.max_length:,} are allowed")

    def _read_image(self, facts: PartFacts, record: AnyRecord, image: str) -> int | None:
        """Return the hash of the content of an image, or None if it was not read. Add what is wrong with it."""
        if self.look is None:
            return None
        seen, problems = look_at_image(self.path.parent / image, record, self.look)
        facts.add_problems(facts.lines, problems)
        return None if seen is None else hash(seen.content_hash)


def look_at_image(file: Path, record: AnyRecord, look: ReadImage) -> tuple[ImageFacts | None, tuple[Problem, ...]]:
    """Return the facts of the image of a record, and what is wrong with it."""
    try:
        image = look(file)
    except FileNotFoundError:
        return None, (Problem("image-missing", repr(record.image)),)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        if size_problem(record.width, record.height):
            return None, ()  # `check_record` has reported this size
        return None, (Problem("image-unreadable", f"{record.image!r}: {error}"),)
    return image, check_image(record, image)


class _Examination:
    """The findings and statistics of the parts that were read so far, in the order of the file."""

    def __init__(self, path: Path) -> None:
        self._path, self._whole = path, PartFacts()
        self._places: dict[str, list[Place]] = {}  # by code
        self._paths: dict[int, int] = {}  # from the hash of a path to the first line that has it
        self._contents: dict[int, int] = {}  # from the hash of a content to the first line that has it

    def merge(self, part: PartFacts) -> None:
        whole, before = self._whole, self._whole.lines
        for line, problem in part.examples:
            self._add_place(before + line, problem)
        for line, image, path_hash, content_hash in part.images:
            self._find_duplicates(before + line, image, path_hash, content_hash)
        whole.lines += part.lines
        whole.records += part.records
        whole.questions += part.questions
        whole.objects += part.objects
        whole.counts.update(part.counts)
        whole.classes.merge(part.classes)
        whole.sizes.merge(part.sizes)
        whole.suspicions.merge(part.suspicions)
        whole.tokens.merge(part.tokens)
        whole.example_tokens.merge(part.example_tokens)

    def report(self) -> DataReport:
        whole = self._whole
        if not whole.records and not whole.counts:
            self._add(None, Problem("no-records", "nothing to train on"))
        for measure in (whole.suspicions, whole.classes, whole.sizes):
            for problem in measure.problems():
                self._add(None, problem)
        findings = tuple(  # in the order of `KINDS`: errors first, and general problems before those of one object
            replace(kind, count=whole.counts[code], places=tuple(self._places[code]))
            for code, kind in KINDS.items()
            if code in whole.counts
        )
        return DataReport(
            self._path,
            whole.records,
            whole.questions,
            whole.objects,
            findings,
            whole.classes,
            whole.sizes,
            whole.tokens.count,
            whole.example_tokens.count,
        )

    def _find_duplicates(self, line: int, image: str, path_hash: int, content_hash: int | None) -> None:
        first = self._paths.setdefault(path_hash, line)
        if first != line:
            self._add(line, Problem("duplicate-image", f"{image!r}, as in line {first}"))
        if content_hash is None:
            return
        twin = self._contents.setdefault(content_hash, line)
        if twin != line and first == line:
            self._add(line, Problem("duplicate-content", f"{image!r}, as in line {twin}"))

    def _add(self, line: int | None, problem: Problem) -> None:
        self._whole.counts[problem.code] += 1
        self._add_place(line, problem)

    def _add_place(self, line: int | None, problem: Problem) -> None:
        places = self._places.setdefault(problem.code, [])
        if len(places) < EXAMPLES:
            places.append(Place(str(self._path), line, problem.detail))
