"""Read a data file line by line and report on it: problems, classes, sizes of objects, tokens of answers. Memory
grows by two numbers per image.

The file is read in parts, by several processes if they are allowed. The facts about the parts are then merged in
the order of the file. The function that reads an image file is passed in; without it, image files are not opened.
"""

import hashlib
import math
import multiprocessing
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from coordexp.data import stores
from coordexp.data.addresses import join_address
from coordexp.data.doctor.checks import KINDS, Problem, Suspicions, check_image, check_record
from coordexp.data.geometry import BINS
from coordexp.data.images import ImageFacts, size_problem
from coordexp.data.index import open_records
from coordexp.data.records import AnyRecord, ChatRecord, Record, parse_any_record
from coordexp.data.shards import Shard
from coordexp.errors import DataError, Finding, Place, explain
from coordexp.tasks import ignore

T = TypeVar("T")
MOST_CLASSES = 100_000  # counted by name, to bound the memory: free text may describe every object differently
EXAMPLES = 5  # kept per finding
MIXED = 0.05  # share of the rarer kind of shape from which a class counts as mixed
PART = 2**18  # bytes of a part of the file, about a tenth of a second of work, so that all processes end together
Part = tuple[int, int]  # the bytes at which it begins and ends
WHOLE = Shard(0, 1)
AHEAD = 64  # parts per process that are read before the next ones are given out, to bound the memory
LINES_AHEAD = 64  # whose images are read ahead, if they are in a store
ReadImage = Callable[[str], ImageFacts]  # takes an address
STEPS = (0, 5, 10, 20, 50, 100, 200, 500, BINS)  # of the histogram of sides
SMALL = 20  # bins; below this median side, the masks of matching are too coarse


class ExampleTokens(NamedTuple):
    """The tokens of an example: those of its prompt, with those of its image, and those of its answer, with the
    end of the turn."""

    prompt: int
    answer: int


# A function that counts the tokens of the example of a record. It raises ValueError if there can be none.
CountTokens = Callable[[AnyRecord], ExampleTokens]
# How many answers or examples have so many tokens and objects. The objects of a question and its answer are None.
Lengths = Counter[tuple[int, int | None]]


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens per answer or per example: median, 95th percentile and maximum. `per_object` is the number of all
    tokens by that of all objects, in records with objects."""

    records: int
    per_object: float
    median: int
    p95: int
    longest: int

    @classmethod
    def of(cls, counts: Lengths) -> "TokenCount | None":
        lengths, totals = Counter[int](), Counter[str]()
        for (length, objects), count in counts.items():
            lengths[length] += count
            if objects is not None:
                totals.update(tokens=length * count, objects=objects * count)
        median, p95 = quantile(lengths, 0.5), quantile(lengths, 0.95)
        if median is None or p95 is None:
            return None
        per_object = round(totals["tokens"] / max(1, totals["objects"]), 1)
        return cls(lengths.total(), per_object, median, p95, max(lengths))


def quantile(counts: Counter[int], share: float) -> int | None:
    """Return the smallest value that at least this share of the counted values does not exceed, or None if nothing
    was counted."""
    needed, passed = share * counts.total(), 0
    for value in sorted(value for value, count in counts.items() if count):
        passed += counts[value]
        if passed >= needed:
            return value
    return None


def measure_sides(record: Record) -> Iterator[int]:
    """Yield the side of each object in bins: the square root of width times height."""
    scale = (BINS - 1) / math.sqrt(record.extent[0] * record.extent[1])
    for item in record.objects:
        xs, ys = item.coords[::2], item.coords[1::2]
        side = scale * math.sqrt((max(xs) - min(xs)) * (max(ys) - min(ys)))
        yield min(BINS - 1, round(side))


# An image as a record uses it: line, path, hash of the path, and hash of the content, or None if it was not read.
# The request of the record is a part of both hashes: an image with another request is not a duplicate. Tuples of
# numbers and texts are sent quickly.
ImageUse = tuple[int, str, int, int | None]


@dataclass
class Facts:
    """The findings and statistics of a part of a file, or of the whole. Lines are numbered from 1 in each part.
    `uncounted` are the objects of classes beyond `MOST_CLASSES`."""

    records: int = 0
    questions: int = 0
    objects: int = 0
    uncounted: int = 0
    classes: Counter[str] = field(default_factory=Counter)  # the objects of each class
    boxes: Counter[str] = field(default_factory=Counter)  # those of them that are boxes
    sides: Counter[int] = field(default_factory=Counter)  # objects by their side in bins
    answers: Lengths = field(default_factory=Counter)
    examples: Lengths = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)  # by code
    places: dict[str, list[tuple[int | None, str]]] = field(default_factory=dict)  # the first ones of each code
    images: list[ImageUse] = field(default_factory=list)
    suspicions: Suspicions = field(default_factory=Suspicions)

    def add(self, line: int | None, problem: Problem) -> None:
        self.problems[problem.code] += 1
        self._add_place(problem.code, line, problem.detail)

    def _add_place(self, code: str, line: int | None, detail: str) -> None:
        places = self.places.setdefault(code, [])
        if len(places) < EXAMPLES:
            places.append((line, detail))

    def merge(self, part: "Facts", before: int) -> None:
        """Add the facts about a part of the file that has so many lines before it, except for its images."""
        for code, places in part.places.items():
            for line, detail in places:
                self._add_place(code, None if line is None else before + line, detail)
        self.records += part.records
        self.questions += part.questions
        self.objects += part.objects
        for desc, count in part.classes.items():
            if desc in self.classes or len(self.classes) < MOST_CLASSES:
                self.classes[desc] += count
                self.boxes[desc] += part.boxes[desc]
            else:
                self.uncounted += count
        self.sides.update(part.sides)
        self.answers.update(part.answers)
        self.examples.update(part.examples)
        self.problems.update(part.problems)
        self.suspicions.merge(part.suspicions)

    def conclude(self) -> Iterator[Problem]:
        """Yield the problems that only the whole file shows."""
        if not self.records and not self.problems:
            yield Problem("no-records", "nothing to train on")
        yield from self.suspicions.problems()
        for desc, count in self.classes.items():
            polygons = count - self.boxes[desc]
            if min(self.boxes[desc], polygons) >= max(1, MIXED * count):
                yield Problem("mixed-shapes", f"{desc!r}: {self.boxes[desc]:,} boxes and {polygons:,} polygons")
        spellings: dict[str, list[str]] = {}
        for desc in self.classes:
            spellings.setdefault(" ".join(desc.casefold().split()), []).append(desc)
        for variants in spellings.values():
            if len(variants) > 1:
                shown = [f"{desc!r} ({self.classes[desc]:,})" for desc in variants[:4]]
                yield Problem("desc-spelling", ", ".join(shown))
        median = quantile(self.sides, 0.5)
        if median is not None and median < SMALL:
            yield Problem("small-objects", f"median side {median} of {BINS:,} bins")


@dataclass(frozen=True)
class DataReport:
    """The findings about a file, errors first, and its statistics."""

    file: Path
    findings: tuple[Finding, ...]
    facts: Facts

    @property
    def errors(self) -> int:
        return sum(finding.count for finding in self.findings if finding.severity == "error")

    @property
    def tokens(self) -> TokenCount | None:
        """The tokens of answers."""
        return TokenCount.of(self.facts.answers)

    @property
    def examples(self) -> TokenCount | None:
        """The tokens of whole examples, with prompt and image."""
        return TokenCount.of(self.facts.examples)

    @property
    def median_side(self) -> int | None:
        return quantile(self.facts.sides, 0.5)

    @property
    def histogram(self) -> tuple[tuple[int, int, int], ...]:
        """The number of objects per range of sides, as (lowest side, end of the range, objects)."""
        sides = self.facts.sides
        return tuple((low, high, sum(sides[side] for side in range(low, high))) for low, high in pairwise(STEPS))


@dataclass(frozen=True, slots=True)
class CheckedLine:
    """A line with its number and its record, or None if the line is broken; what is wrong with the line and with
    its image; and the facts of the image, if it was read."""

    number: int
    text: bytes
    record: AnyRecord | None
    own_problems: tuple[Problem, ...]
    image_problems: tuple[Problem, ...] = ()
    image: ImageFacts | None = None

    @property
    def problems(self) -> tuple[Problem, ...]:
        return (*self.image_problems, *self.own_problems)


def check_lines(lines: Iterable[bytes], folder: Path, look: ReadImage | None) -> Iterator[CheckedLine]:
    """Yield the lines that are not blank, numbered from 1. Image paths are relative to `folder`. `look` reads the
    facts of an image file; without it, no image is opened."""
    for number, line, record in _parse_ahead(lines, None if look is None else folder):
        if isinstance(record, ValueError):
            yield CheckedLine(number, line, None, (Problem("broken-line", str(record)),))
        else:
            image, of_image = look_at_image(folder, record, look)
            yield CheckedLine(number, line, record, check_record(record), of_image, image)


def _parse_ahead(
    lines: Iterable[bytes], folder: Path | None
) -> Iterator[tuple[int, bytes, AnyRecord | ValueError]]:
    """Yield the lines that are not blank, with their numbers, and their records or what is wrong with them. With a
    folder, the images of the lines behind the one that is yielded are read meanwhile, if they are in a store."""
    waiting: deque[tuple[int, bytes, AnyRecord | ValueError]] = deque()
    ahead = LINES_AHEAD if folder is not None and stores.are_used() else 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_any_record(line)
        except ValueError as error:
            waiting.append((number, line, error))
        else:
            waiting.append((number, line, record))
            if folder is not None and record.image is not None:
                stores.read_ahead([join_address(folder, record.image)])
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


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
    """Report on a data file. The options are those of `read_facts`; parts have about `part` bytes. The report does
    not depend on the number of `processes`."""
    facts = read_facts(path, cut_parts(path, part=part), look, count_tokens, max_length, notify, processes)
    return conclude(path, facts)


def read_facts(
    path: Path,
    parts: Sequence[Part],
    look: ReadImage | None = None,
    count_tokens: CountTokens | None = None,
    max_length: int | None = None,
    notify: Callable[[float], None] = ignore,
    processes: int = 1,
) -> Iterator[tuple[int, Facts]]:
    """Yield the number of lines of each part, and the facts about it. `look` reads the facts of an image file.
    `max_length` is the largest number of tokens of an example, as far as they are counted. `notify` is called with
    the share of the parts that has been read. Several `processes` read parts side by side."""

    def read_part(lines: Sequence[bytes]) -> Facts:
        facts = Facts()
        for line in check_lines(lines, path.parent, look):
            _add_line(facts, line)
            is_usable = all(KINDS[problem.code].severity != "error" for problem in line.own_problems)
            if count_tokens and line.record is not None and is_usable:
                _add_length(facts, line.number, line.record, count_tokens, max_length)
        return facts

    return read_parts(path, parts, read_part, processes, notify)


def conclude(path: Path, parts: Iterable[tuple[int, Facts]]) -> DataReport:
    """Return the report on a file from the number of lines of each of its parts, and the facts about it."""
    whole, before = Facts(), 0
    paths, contents = dict[int, int](), dict[int, int]()  # from the hash of each to the first line that has it
    for lines, facts in parts:
        for line, image, path_hash, content in facts.images:
            line += before
            first = paths.setdefault(path_hash, line)
            twin = line if content is None else contents.setdefault(content, line)
            if first != line:
                whole.add(line, Problem("duplicate-image", f"{image!r}, as in line {first}"))
            elif twin != line:
                whole.add(line, Problem("duplicate-content", f"{image!r}, as in line {twin}"))
        whole.merge(facts, before)
        before += lines
    for problem in list(whole.conclude()):
        whole.add(None, problem)
    findings = []
    for code, kind in KINDS.items():  # errors first, and general problems before those of one object
        if code in whole.problems:
            places = tuple(Place(str(path), *place) for place in whole.places[code])
            findings.append(replace(kind, count=whole.problems[code], places=places))
    return DataReport(path, tuple(findings), whole)


def _add_line(facts: Facts, line: CheckedLine) -> None:
    for problem in line.problems:
        facts.add(line.number, problem)
    record = line.record
    if record is None:
        return
    facts.records += 1
    if isinstance(record, ChatRecord):
        facts.questions += 1
        return
    facts.objects += len(record.objects)
    facts.classes.update(item.desc for item in record.objects)
    facts.boxes.update(item.desc for item in record.objects if item.kind == "bbox_2d")
    facts.sides.update(measure_sides(record))
    facts.suspicions.add(record)
    request = (record.classes, record.expression, record.prompt)
    content = None if line.image is None else _hash(line.image.content_hash, request)
    path_hash = _hash(os.path.normpath(record.image), request)
    facts.images.append((line.number, record.image, path_hash, content))


def _hash(*values: object) -> int:
    """Return a hash of texts and numbers that is the same in every process."""
    text = repr(values).encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _add_length(
    facts: Facts, line: int, record: AnyRecord, count_tokens: CountTokens, max_length: int | None
) -> None:
    """Count the tokens of a record's example. It is a problem if it is too long, or if there can be none."""
    try:
        prompt, answer = count_tokens(record)
    except ValueError as error:
        facts.add(line, Problem("not-writable", str(error)))
        return
    objects = None if isinstance(record, ChatRecord) else len(record.asked_objects)
    facts.answers[answer, objects] += 1
    length = prompt + answer
    facts.examples[length, objects] += 1
    if max_length is not None and length > max_length:
        detail = f"{length:,} tokens, {answer:,} of them the answer; at most {max_length:,} are allowed"
        facts.add(line, Problem("too-long", detail))


def cut_parts(path: Path, shard: Shard = WHOLE, part: int = PART) -> list[Part]:
    """Return where the parts of a shard of a file begin and end. They have about `part` bytes and whole lines. A
    shard without parts gets an empty one."""
    parts, begin, size = list[Part](), 0, path.stat().st_size
    with open_records(path) as file:
        while begin < size:
            file.seek(min(begin + part, size))
            file.readline()
            parts.append((begin, file.tell()))
            begin = file.tell()
    cut = shard.cut(len(parts))
    end = parts[cut.start - 1][1] if cut.start else 0
    return parts[cut.start : cut.stop] or [(end, end)]


def read_parts(
    path: Path,
    parts: Sequence[Part],
    work: Callable[[Sequence[bytes]], T],
    processes: int,
    notify: Callable[[float], None],
) -> Iterator[tuple[int, T]]:
    """Yield the number of lines of each part of a file, and what `work` returns for them, in order. Several
    `processes` read parts side by side. `notify` gets the share of the parts that has been read."""

    def read(bounds: tuple[int, int]) -> tuple[int, T]:
        lines = _read_lines(path, *bounds)
        return len(lines), work(lines)

    processes = min(processes, len(parts)) if sys.platform == "linux" else 1
    results = map(read, parts) if processes <= 1 else _map_in_processes(read, parts, processes)
    for number, result in enumerate(results, start=1):
        yield result
        notify(number / len(parts))


def _read_lines(path: Path, begin: int, end: int) -> list[bytes]:
    with path.open("rb") as file:
        file.seek(begin)
        content = file.read(end - begin)
    if len(content) < end - begin:
        raise DataError(f"{path} was changed while it was read", "start again when it is complete")
    return content.removesuffix(b"\n").split(b"\n") if content else []


def _map_in_processes(
    work: Callable[[tuple[int, int]], T], parts: Sequence[tuple[int, int]], processes: int
) -> Iterator[T]:
    """Yield the results of all parts, in order. The processes are forks of this one, so `work` need not be sent to
    them."""
    context = multiprocessing.get_context("fork")
    killed = "a process that read a part of the file was killed, most likely because memory ran out"
    fix = "end other programs, or allow one processor only (taskset -c 0)"
    pool = ProcessPoolExecutor(processes, context, initializer=_begin_worker, initargs=(work,))
    try:
        with explain(BrokenProcessPool, killed, fix):
            for start in range(0, len(parts), AHEAD * processes):
                yield from pool.map(_work_in_process, parts[start : start + AHEAD * processes])
    finally:
        pool.shutdown(cancel_futures=True)


_work: Callable[[tuple[int, int]], Any]  # of this worker process


def _begin_worker(work: Callable[[tuple[int, int]], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all processes; the first one ends the others


def _work_in_process(part: tuple[int, int]) -> Any:
    return _work(part)
