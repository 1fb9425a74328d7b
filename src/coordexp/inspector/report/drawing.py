"""A chart as inline SVG: bands, lines and marks of groups over steps, coloured and dashed by the page's style.

Each group has its own colour, dashes and mark, so that colour alone says nothing. Numbers of a chart are written
beside it, so the picture itself carries few words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.document import written
from coordexp.inspector.report.axes import Scale, labels, roomy
from coordexp.inspector.report.curves import SMOOTH_FROM, Curve, smoothed
from coordexp.inspector.report.series import Floats

LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 20
SMALL, WIDE, LARGE = (320, 148), (664, 190), (664, 300)
MARKED = 30  # points up to which each is marked
ASIDE = 7.0  # between groups that have one point at the same step
SPREAD = 5.0  # highest by lowest value
MARK_ROW = 13


@dataclass(frozen=True)
class Frame:
    """Size, and the steps from left to right. The page's script reads the places from here."""

    width: int
    height: int
    first: float
    last: float

    @property
    def across(self) -> Scale:
        last = self.last if self.last > self.first else self.first + 1
        return Scale(self.first, last, LEFT, self.width - RIGHT)


@dataclass(frozen=True)
class StepMark:
    """Under a chart: a step that can be looked at, in the row of its run. Without a page `href` is empty."""

    step: int
    row: int
    letter: str
    words: str
    href: str


def line_chart(
    title: str,
    curves: Sequence[tuple[str, Curve]],
    frame: Frame,
    *,
    share: bool = False,
    log: bool = False,
    marks: Sequence[StepMark] = (),
) -> str:
    """`curves` by the letter of their group. With `log` they must be `spread`."""
    bottom = frame.height - BOTTOM
    extent = [value for _, curve in curves for value in _extent(curve)]
    low, high = (min(extent) / 1.1, max(extent) * 1.1) if log else roomy(extent, share)
    up = Scale(low, high, bottom, TOP, log)
    rows = 1 + max((mark.row for mark in marks), default=-1)
    height = frame.height + rows * MARK_ROW
    role = "group" if marks else "img"  # links inside of an image would be lost to those who hear the page
    parts = [
        f'<svg class="chart{" log" if log else ""}" viewBox="0 0 {frame.width} {height}" role="{role}" '
        f'aria-label="{written(title)}{", logarithmic" if log else ""}">',
        *_grid(frame, up),
        *(f'<g class="of-{letter}">{_bands(curve, frame.across, up)}</g>' for letter, curve in curves),
        *(
            f'<g class="of-{letter}">{_lines(letter, curve, frame, up, behind=len(curves) - 1 - k)}</g>'
            for k, (letter, curve) in enumerate(curves)
        ),
        f'<line class="cross" y1="{TOP}" y2="{bottom}" x1="0" x2="0" hidden=""/>',
        *(_step_mark(mark, frame) for mark in marks),
        "</svg>",
    ]
    return "".join(parts)


def spread(curves: Sequence[tuple[str, Curve]]) -> bool:
    """Over so many sizes that a logarithmic scale shows more."""
    extent = [value for _, curve in curves for value in _extent(curve)]
    return min(extent) > 0 and max(extent) / min(extent) > SPREAD


def stacked_chart(title: str, edges: Floats, layers: Sequence[tuple[str, Floats]], frame: Frame) -> str:
    """Columns from edge to edge, layers above each other, the first at the bottom; each by its name in the page's
    style."""
    top = float(np.sum([values for _, values in layers], axis=0).max())
    up = Scale(0.0, top * 1.04 or 1.0, frame.height - BOTTOM, TOP)
    parts, below = [], np.zeros(len(edges) - 1)
    corners = np.repeat(edges, 2)[1:-1]
    for name, values in layers:
        above = below + values
        if values.any():
            area = _area(corners, np.repeat(below, 2), np.repeat(above, 2), frame.across, up)
            parts.append(f'<path class="layer at-{name}" d="{area}"><title>{written(name)}</title></path>')
        below = above
    head = (
        f'<svg class="chart" viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{written(title)}">'
    )
    cross = f'<line class="cross" y1="{TOP}" y2="{frame.height - BOTTOM}" x1="0" x2="0" hidden=""/>'
    return "".join([head, *parts, *_grid(frame, up), cross, "</svg>"])


def mark_shape(letter: str, x: float, y: float, r: float = 2.7) -> str:
    """As a path: a disc, a square, and so on, one for each letter."""
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


def _extent(curve: Curve) -> list[float]:
    return [float(np.nanmin(curve.lowest)), float(np.nanmax(curve.highest))]


def _grid(frame: Frame, up: Scale) -> list[str]:
    across, bottom, right = frame.across, frame.height - BOTTOM, frame.width - RIGHT
    parts = []
    rows = up.ticks(4 if frame.height < 180 else 5)
    for value, label in zip(rows, labels(rows), strict=True):
        y = up.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>')
    columns = [value for value in across.ticks(4 if frame.width < 400 else 8) if value == int(value)]
    for value, label in zip(columns, labels(columns), strict=True):
        x = across.at(value)
        end = ' text-anchor="end"' if x > right - 12 else ' text-anchor="middle"'
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v3"/>')
        parts.append(f'<text x="{min(x, right):.1f}" y="{bottom + 14}"{end}>{label}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>')
    return parts


def _bands(curve: Curve, across: Scale, up: Scale) -> str:
    """All values, and over them those of the runs; a band without height is left out."""
    found = []
    outer = _differ(curve.lowest, curve.highest)
    inner = _differ(curve.low, curve.high)
    same = np.allclose(curve.lowest, curve.low, equal_nan=True) and np.allclose(
        curve.highest, curve.high, equal_nan=True
    )
    if outer and not (inner and same):
        found.append(f'<path class="all" d="{_area(curve.steps, curve.lowest, curve.highest, across, up)}"/>')
    if inner:
        found.append(f'<path class="band" d="{_area(curve.steps, curve.low, curve.high, across, up)}"/>')
    return "".join(found)


def _differ(low: Floats, high: Floats) -> bool:
    return bool(np.nanmax(high - low) > 0)


def _lines(letter: str, curve: Curve, frame: Frame, up: Scale, behind: int) -> str:
    """`behind` is how many groups come after this one."""
    across = frame.across
    raw = _path(curve.steps, curve.mean, across, up)
    if len(curve) > SMOOTH_FROM:
        calm = _path(curve.steps, smoothed(curve.mean)[0], across, up)
        found = f'<path class="raw" d="{raw}"/><path class="line" d="{calm}"/>'
    else:
        found = f'<path class="line" d="{raw}"/>'
    if np.isfinite(curve.mean).sum() <= MARKED:
        found += _marks(letter, curve, across, up, ASIDE * behind if len(curve) == 1 else 0.0)
    for k in curve.broken[:50]:
        x, y = across.at(curve.steps[k]), frame.height - BOTTOM
        found += f'<path class="broken" d="M{x - 3:.1f} {y - 8}l6 6m-6 0l6-6"><title>no number</title></path>'
    return found


def _marks(letter: str, curve: Curve, across: Scale, up: Scale, aside: float) -> str:
    """Each point. One that stands alone has no band to lie in: it gets a whisker, beside those of other groups."""
    shapes = whiskers = ""
    for k in np.flatnonzero(np.isfinite(curve.mean)):
        x, y = across.at(curve.steps[k]) - aside, up.at(curve.mean[k])
        shapes += mark_shape(letter, x, y)
        if len(curve) == 1 and curve.low[k] < curve.high[k]:
            whiskers += f"M{x:.1f} {up.at(curve.low[k]):.1f}V{up.at(curve.high[k]):.1f}"
    return (f'<path class="whisker" d="{whiskers}"/>' if whiskers else "") + f'<path class="mark" d="{shapes}"/>'


def _pieces(values: Floats) -> list[slice]:
    """Stretches without a gap."""
    known = np.concatenate([[False], np.isfinite(values), [False]])
    edges = np.flatnonzero(known[1:] != known[:-1])
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _path(steps: Floats, values: Floats, across: Scale, up: Scale) -> str:
    return "".join("M" + _places(steps[piece], values[piece], across, up) for piece in _pieces(values))


def _area(steps: Floats, low: Floats, high: Floats, across: Scale, up: Scale) -> str:
    return "".join(
        f"M{_places(steps[piece], high[piece], across, up)}L"
        f"{_places(steps[piece][::-1], low[piece][::-1], across, up)}Z"
        for piece in _pieces(low + high)
    )


def _places(steps: Floats, values: Floats, across: Scale, up: Scale) -> str:
    return " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in zip(steps, values, strict=True))


def _step_mark(mark: StepMark, frame: Frame) -> str:
    x, y = frame.across.at(mark.step), frame.height + mark.row * MARK_ROW + 2
    shape = f'<path d="M{x:.1f} {y}l4.5 8h-9z"/>'
    inside = f"<title>{written(mark.words)}</title>{shape}"
    if not mark.href:
        return f'<g class="step of-{mark.letter}">{inside}</g>'
    link = f'href="{written(mark.href)}" aria-label="{written(mark.words)}"'
    return f'<a class="step of-{mark.letter}" {link}>{inside}</a>'
