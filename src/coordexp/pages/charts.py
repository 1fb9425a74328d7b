"""Charts as inline SVG, with their scales and number formats.

Each line has a letter, and each letter its own colour, dashes and mark, so that nothing depends on colour alone.
The page's style sets them. The numbers of a chart are written beside it, so the drawing itself has few words.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.pages.curves import SMOOTH_FROM, Curve, Floats, smooth
from coordexp.pages.document import escape_text

LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 20  # margins around the plotting area
SMALL, WIDE, LARGE = (320, 148), (664, 190), (664, 300)
MARKED_POINTS = 30  # up to which every point has a mark
GROUP_OFFSET = 7.0  # between groups that have a single point at the same step
LOG_SCALE_FROM = 5.0  # highest value divided by lowest
MARK_ROW, AXIS_ROW = 13, 12  # heights below a chart: of a row of step marks, and of the name of the axis

TICK_GAPS = (1.0, 2.0, 2.5, 5.0, 10.0)
MIN_DIGITS = 3  # of a tick
MIN_GAP = 1e-300  # between ticks


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels: `low` to `start` and `high` to `end`. With `log`, powers of ten are equally
    spaced."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, value, high = (math.log10(x) if self.log else x for x in (self.low, value, self.high))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        return (
            choose_log_ticks(self.low, self.high, count) if self.log else choose_ticks(self.low, self.high, count)
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


def choose_log_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` powers of ten inside the range. In a short range, add 2 and 5 times each power."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    gap = max(1, round((last - first) / (count + 1)))
    digits = (1, 2, 5) if last - first <= 2 else (1,)
    values = [float(f"{digit}e{k}") for k in range(first, last + 1, gap) for digit in digits]
    return [value for value in values if low <= value <= high]


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


@dataclass(frozen=True)
class Frame:
    """The size of a chart, and the numbers at its left and right end: steps, unless the axis has a name."""

    width: int
    height: int
    first: float
    last: float
    axis: str = ""

    @property
    def across(self) -> Scale:
        last = self.last if self.last > self.first else self.first + 1
        return Scale(self.first, last, LEFT, self.width - RIGHT)


@dataclass(frozen=True)
class StepMark:
    """A triangle under a chart: a step with dumped examples, in the row of its run. `href` is empty if there is no
    page to link to."""

    step: int
    row: int
    letter: str
    words: str
    href: str


def draw_lines(
    title: str,
    curves: Sequence[tuple[str, Curve]],
    frame: Frame,
    *,
    share: bool = False,
    log: bool = False,
    marks: Sequence[StepMark] = (),
    limits: tuple[float, float] | None = None,
    ring: tuple[float, float, str] | None = None,
    stairs: bool = False,
) -> str:
    """Return a line chart. `curves` are pairs of a letter and a curve. `log` needs positive values. The values at
    the ends are chosen by the curves, unless `limits` gives them. `ring` marks a point: its place and its
    tooltip. With `stairs`, the value of a point holds from the point before it, and the line has steps."""
    extent = _extent(curves)
    low, high = limits or ((extent[0] / 1.1, extent[1] * 1.1) if log else pad_range(extent, share))
    up = Scale(low, high, frame.height - BOTTOM, TOP, log)
    rows = 1 + max((mark.row for mark in marks), default=-1)
    parts = [
        *_draw_grid(frame, up),
        *(f'<g class="of-{letter}">{_draw_bands(curve, frame.across, up)}</g>' for letter, curve in curves),
        *(
            f'<g class="of-{letter}">{_draw_line(letter, curve, frame, up, len(curves) - 1 - k, stairs)}</g>'
            for k, (letter, curve) in enumerate(curves)
        ),
        *(_draw_step_mark(mark, frame) for mark in marks),
    ]
    if ring:
        place = f'cx="{frame.across.at(ring[0]):.1f}" cy="{up.at(ring[1]):.1f}"'
        parts.append(f'<circle class="ring" {place} r="6"><title>{escape_text(ring[2])}</title></circle>')
    words = f"{title}{', logarithmic' if log else ''}"
    more = rows * MARK_ROW + (AXIS_ROW if frame.axis else 0)
    return _draw_chart(words, parts, frame, more, " log" if log else "", has_links=bool(marks))


def _draw_chart(
    title: str, parts: Sequence[str], frame: Frame, more: int = 0, style: str = "", *, has_links: bool = False
) -> str:
    """Return the SVG element, with a line for the step that the reader points at. `more` is its height below the
    frame."""
    role = "group" if has_links else "img"  # screen readers do not announce links inside an image
    return (
        f'<svg class="chart{style}" viewBox="0 0 {frame.width} {frame.height + more}" role="{role}" '
        f'aria-label="{escape_text(title)}">{"".join(parts)}'
        f'<line class="cross" y1="{TOP}" y2="{frame.height - BOTTOM}" x1="0" x2="0" hidden=""/></svg>'
    )


def needs_log_scale(curves: Sequence[tuple[str, Curve]]) -> bool:
    """Return whether the values are positive and differ so much that a logarithmic scale shows more."""
    low, high = _extent(curves)
    return low > 0 and high / low > LOG_SCALE_FROM


def draw_stack(title: str, edges: Floats, layers: Sequence[tuple[str, Floats]], frame: Frame) -> str:
    """Return a stacked chart with columns from edge to edge. The first layer is at the bottom. The page's style
    colours each layer by its name."""
    top = float(np.sum([values for _, values in layers], axis=0).max())
    up = Scale(0.0, top * 1.04 or 1.0, frame.height - BOTTOM, TOP)
    parts, below = [], np.zeros(len(edges) - 1)
    corners = np.repeat(edges, 2)[1:-1]
    for name, values in layers:
        above = below + values
        if values.any():
            area = _area_path(corners, np.repeat(below, 2), np.repeat(above, 2), frame.across, up)
            parts.append(f'<path class="layer at-{name}" d="{area}"><title>{escape_text(name)}</title></path>')
        below = above
    return _draw_chart(title, [*parts, *_draw_grid(frame, up)], frame)


def draw_key(letter: str) -> str:
    """Return a sample of the line and the mark of a letter."""
    return (
        '<svg class="key-line" viewBox="0 0 34 12" aria-hidden="true"><path class="line" d="M1 6H33"/>'
        f'<path class="mark" d="{mark_path(letter, 17, 6, 3.4)}"/></svg>'
    )


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


def _extent(curves: Sequence[tuple[str, Curve]]) -> tuple[float, float]:
    """Return the lowest and the highest value of all lines."""
    lowest, highest = (
        np.concatenate([getattr(curve, end) for _, curve in curves]) for end in ("lowest", "highest")
    )
    return float(np.nanmin(lowest)), float(np.nanmax(highest))


def _draw_grid(frame: Frame, up: Scale) -> list[str]:
    across, bottom, right = frame.across, frame.height - BOTTOM, frame.width - RIGHT
    parts = []
    rows = up.ticks(4 if frame.height < 180 else 5)
    for value, label in zip(rows, format_ticks(rows), strict=True):
        y = up.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>')
    columns = across.ticks(4 if frame.width < 400 else 8)
    columns = [value for value in columns if value == int(value)] if not frame.axis else columns
    for value, label in zip(columns, format_ticks(columns), strict=True):
        x = across.at(value)
        anchor = "end" if x > right - 12 else "middle"
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v3"/>')
        parts.append(f'<text x="{min(x, right):.1f}" y="{bottom + 14}" text-anchor="{anchor}">{label}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>')
    if frame.axis:
        place = f'x="{(LEFT + right) / 2}" y="{frame.height + AXIS_ROW - 4}"'
        parts.append(f'<text {place} text-anchor="middle">{escape_text(frame.axis)}</text>')
    return parts


def _draw_bands(curve: Curve, across: Scale, up: Scale) -> str:
    """Draw the band of all values and over it the band of the runs. A band without height is left out."""
    pairs = {"all": (curve.lowest, curve.highest), "band": (curve.low, curve.high)}
    if np.allclose(pairs["all"], pairs["band"], equal_nan=True):
        del pairs["all"]
    return "".join(
        f'<path class="{style}" d="{_area_path(curve.steps, low, high, across, up)}"/>'
        for style, (low, high) in pairs.items()
        if np.nanmax(high - low) > 0
    )


def _draw_line(letter: str, curve: Curve, frame: Frame, up: Scale, following: int, stairs: bool) -> str:
    """`following` is the number of groups that are drawn after this one."""
    across = frame.across
    raw = _line_path(*(_add_corners(curve, frame) if stairs else (curve.steps, curve.mean)), across, up)
    if not frame.axis and len(curve) > SMOOTH_FROM:
        smooth_path = _line_path(curve.steps, smooth(curve.mean)[0], across, up)
        svg = f'<path class="raw" d="{raw}"/><path class="line" d="{smooth_path}"/>'
    else:
        svg = f'<path class="line" d="{raw}"/>'
    if np.isfinite(curve.mean).sum() <= MARKED_POINTS:
        svg += _draw_marks(letter, curve, across, up, GROUP_OFFSET * following if len(curve) == 1 else 0.0)
    for k in curve.broken[:50]:
        x, y = across.at(curve.steps[k]), frame.height - BOTTOM
        svg += f'<path class="broken" d="M{x - 3:.1f} {y - 8}l6 6m-6 0l6-6"><title>not a number</title></path>'
    return svg


def _add_corners(curve: Curve, frame: Frame) -> tuple[Floats, Floats]:
    """Return the points of a line that goes up or down at a point and then straight to the next one. It begins at
    the left end of the frame."""
    before = np.concatenate([[frame.first], curve.steps[:-1]])
    return np.stack([before, curve.steps], axis=1).ravel(), np.repeat(curve.mean, 2)


def _draw_marks(letter: str, curve: Curve, across: Scale, up: Scale, offset: float) -> str:
    """Mark every point. A single point has no band, so it gets a whisker, moved aside from those of other
    groups."""
    shapes = whiskers = ""
    for k in np.flatnonzero(np.isfinite(curve.mean)):
        x, y = across.at(curve.steps[k]) - offset, up.at(curve.mean[k])
        shapes += mark_path(letter, x, y)
        if len(curve) == 1 and curve.low[k] < curve.high[k]:
            whiskers += f"M{x:.1f} {up.at(curve.low[k]):.1f}V{up.at(curve.high[k]):.1f}"
    return (f'<path class="whisker" d="{whiskers}"/>' if whiskers else "") + f'<path class="mark" d="{shapes}"/>'


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


def _draw_step_mark(mark: StepMark, frame: Frame) -> str:
    x, y = frame.across.at(mark.step), frame.height + mark.row * MARK_ROW + 2
    shape = f'<title>{escape_text(mark.words)}</title><path d="M{x:.1f} {y}l4.5 8h-9z"/>'
    if not mark.href:
        return f'<g class="step of-{mark.letter}">{shape}</g>'
    link = f'href="{escape_text(mark.href)}" aria-label="{escape_text(mark.words)}"'
    return f'<a class="step of-{mark.letter}" {link}>{shape}</a>'
