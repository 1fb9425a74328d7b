"""What a file is made of: its classes, the sizes of its objects, the tokens of its answers. Counts only."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from coordexp.data.coordinates import BINS
from coordexp.data.doctor.checks import Problem
from coordexp.data.records import Record
from coordexp.data.sample import TrueObject

MOST_CLASSES = 100_000  # different descriptions that are counted; free text may have as many as objects
# Counts the tokens of the answer with these objects.
CountTokens = Callable[[Sequence[TrueObject]], int]
STEPS = (0, 5, 10, 20, 50, 100, 200, 500, BINS)
SMALL = 20


class Classes:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.uncounted = 0

    def add(self, record: Record) -> None:
        for found in record.objects:
            if found.desc in self.counts or len(self.counts) < MOST_CLASSES:
                self.counts[found.desc] += 1
            else:
                self.uncounted += 1

    def problems(self) -> Iterator[Problem]:
        spellings: dict[str, list[str]] = {}
        for desc in self.counts:
            spellings.setdefault(" ".join(desc.casefold().split()), []).append(desc)
        for alike in spellings.values():
            if len(alike) > 1:
                shown = [f"{desc!r} ({self.counts[desc]:,})" for desc in alike[:4]]
                yield Problem("desc-spelling", ", ".join(shown))


class Sizes:
    """Sides in bins: the root of width times height."""

    def __init__(self) -> None:
        self.sides = [0] * BINS

    def add(self, record: Record) -> None:
        scale = (BINS - 1) / math.sqrt(record.extent[0] * record.extent[1])
        for found in record.objects:
            xs, ys = found.coords[::2], found.coords[1::2]
            side = scale * math.sqrt((max(xs) - min(xs)) * (max(ys) - min(ys)))
            self.sides[min(BINS - 1, round(side))] += 1

    @property
    def median(self) -> int | None:
        return quantile(Counter(dict(enumerate(self.sides))), 0.5)

    @property
    def histogram(self) -> tuple[tuple[int, int, int], ...]:
        """From, below, objects."""
        return tuple((low, high, sum(self.sides[low:high])) for low, high in pairwise(STEPS))

    def problems(self) -> Iterator[Problem]:
        if self.median is not None and self.median < SMALL:
            yield Problem("small-objects", f"median side {self.median} bins of {BINS:,}")


@dataclass(frozen=True, slots=True)
class TokenCount:
    records: int
    per_object: float
    median: int
    high: int  # 95 of 100 records have no more
    longest: int


class Tokens:
    """Of the answers as they are trained on, with the end of the turn; image and prompt come on top."""

    def __init__(self, count_tokens: CountTokens) -> None:
        self._count_tokens = count_tokens
        self._lengths: Counter[int] = Counter()
        self._objects = 0

    def add(self, objects: Sequence[TrueObject]) -> int:
        length = self._count_tokens(objects)
        self._lengths[length] += 1
        self._objects += len(objects)
        return length

    @property
    def count(self) -> TokenCount | None:
        median, high = quantile(self._lengths, 0.5), quantile(self._lengths, 0.95)
        if median is None or high is None:
            return None
        total = sum(length * count for length, count in self._lengths.items())
        records = self._lengths.total()
        return TokenCount(records, total / max(1, self._objects), median, high, max(self._lengths))


def quantile(counts: Counter[int], share: float) -> int | None:
    """The smallest value that at least this share does not exceed."""
    wanted, passed = share * counts.total(), 0
    for value in sorted(value for value, count in counts.items() if count):
        passed += counts[value]
        if passed >= wanted:
            return value
    return None
