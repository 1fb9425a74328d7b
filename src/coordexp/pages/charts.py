"""Line charts as inline SVG, with their scales and number formats. The template `chart.html` writes what is laid
out here.

Each line has a letter, and each letter its own colour, dashes and mark, so that nothing depends on colour alone.
The page's style sets them. The numbers of a chart are written beside it, so the drawing itself has few words.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from coordexp.pages.curves import SMOOTH_FROM, Curve, Floats, smooth

LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 20  # margins around the plotting area
SMALL, LARGE = (320, 148), (664, 300)
MARKED_POINTS = 30  # up to which every point has a mark
AXIS_ROW = 12  # height of the name of the axis, below a chart

TICK_GAPS = (1.0, 2.0, 2.5, 5.0, 10.0)
MIN_DIGITS = 3  # of a tick
MIN_GAP = 1e-300  # between ticks


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels: `low` to `start` and `high` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


@dataclass(frozen=True)
class DrawnLine:
    """A line as SVG paths: pairs of a style and a path, from the bottom to the top. `broken` are the points at the
    bottom with values that are not numbers."""

    letter: str
    areas: list[tuple[str, str]]
    paths: list[tuple[str, str]]
    marks: str = ""
    broken: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Chart:
    """A chart as it is laid out. `rows` and `columns` are the places of ticks and their labels. `ring` marks a
    point: its place and its tooltip."""

    title: str
    width: int
    height: int
    rows: list[tuple[float, str]]
    columns: list[tuple[float, str]]
    lines: list[DrawnLine]
    axis: str = ""
    ring: tuple[float, float, str] | None = None

    left, top = LEFT, TOP

    @property
    def right(self) -> int:
        return self.width - RIGHT

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM

    @property
    def whole_height(self) -> int:
        """The height with the name of the axis."""
        return self.height + (AXIS_ROW if self.axis else 0)


def lay_out(
    title: str,
    curves: Sequence[tuple[str, Curve]],
    size: tuple[int, int],
    ends: tuple[float, float],
    *,
    share: bool = False,
    axis: str = "",
    limits: tuple[float, float] | None = None,
    ring: tuple[float, float, str] | None = None,
) -> Chart:
    """Return a line chart. `curves` are pairs of a letter and a curve. `ends` are the numbers at the left and the
    right end: steps, unless the `axis` has a name. The values at the bottom and the top are chosen by the curves,
    unless `limits` gives them."""
    width, height = size
    across = Scale(ends[0], ends[1] if ends[1] > ends[0] else ends[0] + 1, LEFT, width - RIGHT)
    lowest = np.concatenate([curve.lowest for _, curve in curves])
    highest = np.concatenate([curve.highest for _, curve in curves])
    low, high = limits or pad_range([float(np.nanmin(lowest)), float(np.nanmax(highest))], share)
    up = Scale(low, high, height - BOTTOM, TOP)
    rows = choose_ticks(low, high, 4 if height < 180 else 5)
    columns = choose_ticks(across.low, across.high, 4 if width < 400 else 8)
    columns = columns if axis else [value for value in columns if value == int(value)]
    return Chart(
        title,
        width,
        height,
        [(round(up.at(value), 1), label) for value, label in zip(rows, format_ticks(rows), strict=True)],
        [(round(across.at(value), 1), label) for value, label in zip(columns, format_ticks(columns), strict=True)],
        [_draw_line(letter, curve, across, up, is_smoothed=not axis) for letter, curve in curves],
        axis,
        (round(across.at(ring[0]), 1), round(up.at(ring[1]), 1), ring[2]) if ring else None,
    )


def _draw_line(letter: str, curve: Curve, across: Scale, up: Scale, *, is_smoothed: bool) -> DrawnLine:
    """Draw the band of all values, over it the band of the runs, and the line. A band without height is left
    out."""
    pairs = {"all": (curve.lowest, curve.highest), "band": (curve.low, curve.high)}
    if np.allclose(*pairs["all"], equal_nan=True) or np.allclose(pairs["all"], pairs["band"], equal_nan=True):
        del pairs["all"]
    areas = [
        (style, _area_path(curve.steps, low, high, across, up))
        for style, (low, high) in pairs.items()
        if np.nanmax(high - low) > 0
    ]
    paths = [("line", _line_path(curve.steps, curve.mean, across, up))]
    if is_smoothed and len(curve) > SMOOTH_FROM:
        paths = [("raw", paths[0][1]), ("line", _line_path(curve.steps, smooth(curve.mean), across, up))]
    known = np.flatnonzero(np.isfinite(curve.mean))
    points = [(across.at(curve.steps[k]), up.at(curve.mean[k])) for k in known] if is_smoothed else []
    marks = "".join(mark_path(letter, x, y) for x, y in points) if len(points) <= MARKED_POINTS else ""
    broken = [round(across.at(curve.steps[k]), 1) for k in curve.broken[:50]]
    return DrawnLine(letter, areas, paths, marks, broken)


def choose_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers inside the range."""
    if not high > low:
        return [low]
    rough = max((high - low) / max(1, count), MIN_GAP)
    ten = 10.0 ** math.floor(math.log10(rough))
    gap = next(digit * ten for digit in TICK_GAPS if digit * ten >= rough * 0.999)
    first = math.ceil(low / gap - 1e-9)
    return [float(f"{k * gap:.12g}") for k in range(first, math.floor(high / gap + 1e-9) + 1)]


def pad_range(values: Sequence[float], share: bool) -> tuple[float, float]:
    """Return a range with some margin around the values. It stays within 0 and 1 for shares that do, and it starts
    at 0 if the values come near 0."""
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or (0.05 if share else 0.5)
    below, above = low - margin, high + margin
    if 0 <= low < 0.35 * high or low == high == 0:
        below = 0.0
    if high <= 0 and low < 0:
        above = min(above, 0.0)
    if share:
        below = max(0.0, below) if low >= 0 else below
        above = min(1.0, above) if high <= 1 else above
    return below, above


def format_number(value: float | None) -> str:
    """Format with four significant digits, and "-" for no number."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if size >= 1 else f"{value:.{3 - min(0, math.floor(math.log10(size)) + 1)}f}"


def format_ticks(values: Sequence[float]) -> list[str]:
    """Format the ticks of an axis with as many digits as it takes to tell them apart."""
    tolerance = min((b - a for a, b in itertools.pairwise(values)), default=math.inf) / 100
    for digits in range(MIN_DIGITS, 17):
        labels = [format_tick(value, digits) for value in values]
        if all(abs(float(label) - value) <= tolerance for label, value in zip(labels, values, strict=True)):
            return labels
    return [format_tick(value, 17) for value in values]


def format_tick(value: float, digits: int = MIN_DIGITS) -> str:
    """Use a power of ten for very small and very large values, unless plain digits would be as short."""
    size = abs(value)
    if value and (size < 1e-3 or size >= (1e5 if digits == MIN_DIGITS else 1e9)):
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{float(mantissa):.{digits}g}e{int(exponent)}"
    return f"{value:.{max(9, digits)}g}"


def format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 90:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} d"


def mark_path(letter: str, x: float, y: float, r: float = 2.7) -> str:
    """Return the SVG path of a group's mark: a disc for A, a square for B, and so on."""
    a, b = x - r, y - r
    long, slim = r * 1.25, r * 0.55
    shapes = {
        "A": f"M{a:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r:.1f} 0a{r} {r} 0 1 0 {-2 * r:.1f} 0",
        "B": f"M{a:.1f} {b:.1f}h{2 * r:.1f}v{2 * r:.1f}h{-2 * r:.1f}z",
        "C": f"M{x:.1f} {y - long:.1f}l{long:.1f} {2 * r:.1f}h{-2 * long:.1f}z",
        "D": f"M{x:.1f} {y - long:.1f}l{long:.1f} {long:.1f}l{-long:.1f} {long:.1f}l{-long:.1f} {-long:.1f}z",
        "E": f"M{x:.1f} {y + long:.1f}l{long:.1f} {-2 * r:.1f}h{-2 * long:.1f}z",
        "F": f"M{x - long:.1f} {y - slim:.1f}h{2 * long:.1f}v{2 * slim:.1f}h{-2 * long:.1f}z",
        "G": f"M{x - slim:.1f} {y - long:.1f}v{2 * long:.1f}h{2 * slim:.1f}v{-2 * long:.1f}z",
        "H": f"M{a:.1f} {b:.1f}l{2 * r:.1f} {2 * r:.1f}h{-2 * r:.1f}l{2 * r:.1f} {-2 * r:.1f}z",
    }
    return shapes[letter]


def _split_at_gaps(values: Floats) -> list[slice]:
    """Return the stretches of values without a gap."""
    known = np.concatenate([[False], np.isfinite(values), [False]])
    edges = np.flatnonzero(known[1:] != known[:-1])
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _line_path(steps: Floats, values: Floats, across: Scale, up: Scale) -> str:
    return "".join("M" + _points(steps[part], values[part], across, up) for part in _split_at_gaps(values))


def _area_path(steps: Floats, low: Floats, high: Floats, across: Scale, up: Scale) -> str:
    return "".join(
        f"M{_points(steps[part], high[part], across, up)}L"
        f"{_points(steps[part][::-1], low[part][::-1], across, up)}Z"
        for part in _split_at_gaps(low + high)
    )


def _points(steps: Floats, values: Floats, across: Scale, up: Scale) -> str:
    return " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in zip(steps, values, strict=True))
