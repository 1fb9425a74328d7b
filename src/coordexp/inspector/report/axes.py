"""Scales, ticks and numbers as charts write them."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

STEPS_OF_TEN = (1.0, 2.0, 2.5, 5.0, 10.0)
FEWEST = 3  # digits of a tick
SMALLEST = 1e-300  # distance of ticks


@dataclass(frozen=True)
class Scale:
    """From values to places: `low` stands at `start`, `high` at `end`; by their powers of ten if `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, value, high = (math.log10(each) if self.log else each for each in (self.low, value, self.high))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int) -> list[float]:
        return powers(self.low, self.high, about) if self.log else ticks(self.low, self.high, about)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers inside of the range, about that many."""
    if not high > low:
        return [low]
    rough = max((high - low) / max(1, about), SMALLEST)
    ten = 10.0 ** math.floor(math.log10(rough))
    gap = next(each * ten for each in STEPS_OF_TEN if each * ten >= rough * 0.999)
    first = math.ceil(low / gap - 1e-9)
    return [float(f"{k * gap:.12g}") for k in range(first, math.floor(high / gap + 1e-9) + 1)]


def powers(low: float, high: float, about: int) -> list[float]:
    """Powers of ten inside of the range, thinned to about that many; of a short range, their 2 and 5 times too."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    apart = max(1, round((last - first) / (about + 1)))
    digits = (1, 2, 5) if last - first <= 2 else (1,)
    found = [float(f"{digit}e{k}") for k in range(first, last + 1, apart) for digit in digits]
    return [value for value in found if low <= value <= high]


def roomy(values: Sequence[float], share: bool) -> tuple[float, float]:
    """A range with some room around the values. Of shares it stays within 0 and 1, if they do; a range that
    comes near 0 begins there."""
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.1 or (0.05 if share else 0.5)
    below, above = low - room, high + room
    if 0 <= low < 0.35 * high or low == high == 0:
        below = 0.0
    if high <= 0 and low < 0:
        above = min(above, 0.0)
    if share:
        below = max(0.0, below) if low >= 0 else below
        above = min(1.0, above) if high <= 1 else above
    return below, above


def number(value: float | None) -> str:
    """Four digits that count, in few letters."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return _powers(f"{value:.2e}")
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if size >= 1 else f"{value:.{3 - min(0, math.floor(math.log10(size)) + 1)}f}"


def labels(values: Sequence[float]) -> list[str]:
    """Of the ticks of an axis, with as many digits as it takes to tell them apart."""
    near = min((b - a for a, b in itertools.pairwise(values)), default=math.inf) / 100
    for digits in range(FEWEST, 17):
        found = [tick(value, digits) for value in values]
        if all(abs(float(label) - value) <= near for label, value in zip(found, values, strict=True)):
            return found
    return [tick(value, 17) for value in values]


def tick(value: float, digits: int = FEWEST) -> str:
    """Far from 1 by a power of ten, unless it takes so many digits that the number itself is as short."""
    size = abs(value)
    if value and (size < 1e-3 or size >= (1e5 if digits == FEWEST else 1e9)):
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{float(mantissa):.{digits}g}e{int(exponent)}"
    return f"{value:.{max(9, digits)}g}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 90:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} d"


def _powers(text: str) -> str:
    mantissa, exponent = text.split("e")
    return f"{mantissa}e{int(exponent)}"
