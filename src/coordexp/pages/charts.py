"""Line charts as inline SVG, with their scales and number formats. The template `chart.html` writes what is laid
out here.

Each line has a letter, and each letter its own colour, dashes and mark, so that nothing depends on colour alone.
The page's style sets them. The numbers of a chart are written beside it, so the drawing itself has few words.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.pages.curves import Curve, Floats

LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 20  # margins around the plotting area
SMALL, LARGE = (320, 148), (664, 300)
MARKED_POINTS = 30  # up to which every point has a mark
AXIS_ROW = 12  # height of the name of the axis, below a chart
TICK_GAPS = (1.0, 2.0, 2.5, 5.0, 10.0)
MIN_GAP = 1e-300  # between ticks
MARKS = {  # SVG paths around the point 0 0, by the letter of the line
    "A": "M-2.7 0a2.7 2.7 0 1 0 5.4 0a2.7 2.7 0 1 0-5.4 0",
    "B": "M-2.7-2.7h5.4v5.4h-5.4z",
    "C": "M0-3.4l3.4 5.4h-6.8z",
    "D": "M0-3.4l3.4 3.4l-3.4 3.4l-3.4-3.4z",
    "E": "M0 3.4l3.4-5.4h-6.8z",
    "F": "M-3.4-1.5h6.8v3h-6.8z",
    "G": "M-1.5-3.4v6.8h3v-6.8z",
    "H": "M-2.7-2.7l5.4 5.4h-5.4l5.4-5.4z",
}


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
    """A line as SVG paths. `bands` are pairs of a style and a path, from the bottom to the top. `points` have a
    mark each. `broken` are the places at the bottom of values that are not numbers."""

    letter: str
    bands: list[tuple[str, str]]
    path: str
    points: list[tuple[float, float]]
    broken: list[float]

    @property
    def mark(self) -> str:
        return MARKS[self.letter]


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

    left = LEFT

    @property
    def right(self) -> int:
        return self.width - RIGHT

    @property
    def bottom(self) -> int:
        """The lower edge of the plotting area. Below are the ticks, and the name of the axis."""
        return self.height - BOTTOM - (AXIS_ROW if self.axis else 0)


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
    lowest = min(float(np.nanmin(curve.lowest)) for _, curve in curves)
    highest = max(float(np.nanmax(curve.highest)) for _, curve in curves)
    low, high = limits or pad_range(lowest, highest, share)
    up = Scale(low, high, height - BOTTOM - (AXIS_ROW if axis else 0), TOP)
    rows = choose_ticks(low, high, 4 if height < 180 else 5)
    columns = choose_ticks(across.low, across.high, 4 if width < 400 else 8)
    columns = columns if axis else [value for value in columns if value == int(value)]
    return Chart(
        title,
        width,
        height,
        [(round(up.at(value), 1), format_tick(value)) for value in rows],
        [(round(across.at(value), 1), format_tick(value)) for value in columns],
        [_draw_line(letter, curve, across, up, is_marked=not axis) for letter, curve in curves],
        axis,
        (round(across.at(ring[0]), 1), round(up.at(ring[1]), 1), ring[2]) if ring else None,
    )


def _draw_line(letter: str, curve: Curve, across: Scale, up: Scale, *, is_marked: bool) -> DrawnLine:
    """Draw the band of all values, over it the band of the runs, and the line. A band without height is left out,
    and so is one that is no wider than the band over it."""
    bands = {"all": (curve.lowest, curve.highest), "band": (curve.low, curve.high)}
    if np.allclose(bands["all"], bands["band"], equal_nan=True):
        del bands["all"]
    known = np.flatnonzero(np.isfinite(curve.mean))
    return DrawnLine(
        letter,
        [
            (style, _area_path(curve.steps, low, high, across, up))
            for style, (low, high) in bands.items()
            if np.nanmax(high - low) > 0
        ],
        _line_path(curve.steps, curve.mean, across, up),
        [(round(across.at(curve.steps[k]), 1), round(up.at(curve.mean[k]), 1)) for k in known]
        if is_marked and len(known) <= MARKED_POINTS
        else [],
        [round(across.at(step), 1) for step in curve.steps[curve.broken]],
    )


def choose_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers inside the range."""
    if not high > low:
        return [low]
    rough = max((high - low) / max(1, count), MIN_GAP)
    ten = 10.0 ** math.floor(math.log10(rough))
    gap = next(digit * ten for digit in TICK_GAPS if digit * ten >= rough * 0.999)
    first = math.ceil(low / gap - 1e-9)
    return [float(f"{k * gap:.12g}") for k in range(first, math.floor(high / gap + 1e-9) + 1)]


def pad_range(low: float, high: float, share: bool) -> tuple[float, float]:
    """Return a range with some margin around the values. It stays within 0 and 1 for shares that do, and it starts
    at 0 if the values come near 0."""
    margin = (high - low) * 0.06 or abs(high) * 0.1 or (0.05 if share else 0.5)
    below, above = low - margin, high + margin
    if 0 <= low < 0.35 * high or low == high == 0:
        below = 0.0
    if share and low >= 0 and high <= 1:
        below, above = max(0.0, below), min(1.0, above)
    return below, above


def format_number(value: float | None) -> str:
    """Format with four significant digits, and "-" for no number."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


def format_tick(value: float) -> str:
    """Format a round number in full: neighbouring ticks may differ in their last digit only."""
    return f"{value:,.12g}"


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
