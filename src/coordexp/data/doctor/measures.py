"""Statistics of a data file: its classes, the sizes of its objects, and the tokens of its answers."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from coordexp.data.doctor.checks import Problem
from coordexp.data.geometry import BINS, TrueObject
from coordexp.data.records import Record

MOST_CLASSES = 100_000  # counted by name, to bound the memory: free text may describe every object differently
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
    high: int  # the 95th percentile
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
        median, high = quantile(self._lengths, 0.5), quantile(self._lengths, 0.95)
        if median is None or high is None:
            return None
        total = sum(length * count for length, count in self._lengths.items())
        records = self._lengths.total()
        return TokenCount(records, total / max(1, self._objects), median, high, max(self._lengths))


def quantile(counts: Counter[int], share: float) -> int | None:
    """Return the smallest value that at least this share of the counted values does not exceed, or None if nothing
    was counted."""
    needed, passed = share * counts.total(), 0
    for value in sorted(value for value, count in counts.items() if count):
        passed += counts[value]
        if passed >= needed:
            return value
    return None
