"""Line charts as inline SVG: precision against recall, and precision, recall and F1 against the score threshold.

Lines differ in their dashes as well as in colour, and each is named where it ends. Colours come from the page's
style, so that the charts follow light and dark.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from coordexp.evaluate.curve import CurvePoint, best_point, thinned

WIDTH, HEIGHT = 440, 280
LEFT, RIGHT, TOP, BOTTOM = 46, 74, 26, 42

TITLES = {"precision": "precision", "recall": "recall", "f1": "F1"}

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """`style` is a class of the page's style: the colour and the dashes."""

    name: str
    style: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    low: float
    high: float

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5

    @property
    def ticks(self) -> list[float]:
        return (
            [self.low + (self.high - self.low) * k / 4 for k in range(5)] if self.high > self.low else [self.low]
        )


def precision_recall_chart(points: Sequence[CurvePoint]) -> str:
    shown = [(point.tally.recall or 0.0, point.tally.precision or 0.0) for point in thinned(points)]
    best = best_point(points)
    assert best is not None
    mark = (best.tally.recall or 0.0, best.tally.precision or 0.0)
    axes = Axis("recall", 0.0, 1.0), Axis("precision", 0.0, 1.0)
    return line_chart("Precision against recall", axes, [Line("", "line-f1", tuple(shown))], mark, _words(best))


def threshold_chart(points: Sequence[CurvePoint]) -> str:
    shown = thinned(points)
    best = best_point(points)
    assert best is not None
    lines = [
        Line(
            TITLES[name],
            f"line-{name}",
            tuple((point.score, getattr(point.tally, name) or 0.0) for point in shown),
        )
        for name in TITLES
    ]
    axes = Axis("score threshold", points[-1].score, points[0].score), Axis("", 0.0, 1.0)
    title = "Precision, recall and F1 against the score threshold"
    return line_chart(title, axes, lines, (best.score, best.tally.f1 or 0.0), _words(best))


def line_chart(title: str, axes: tuple[Axis, Axis], lines: Sequence[Line], mark: Point, words: str) -> str:
    """`mark` is a point with a ring around it and `words` as its tooltip and caption."""
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts += _grid(axes)
    parts += [_line(line, axes) for line in lines]
    parts += _names(lines, axes)
    x, y = _place(mark, axes)
    parts.append(f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>{escape(words)}</title></circle>')
    picture = "\n".join([*parts, "</svg>"])
    return f"<figure><h3>{escape(title)}</h3>\n{picture}\n<figcaption>{escape(words)}</figcaption></figure>"


def _words(best: CurvePoint) -> str:
    return f"Ring: best F1 {best.tally.f1 or 0.0:.3f}, keeping objects that score at least {best.score:.3g}"


def _place(point: Point, axes: tuple[Axis, Axis]) -> Point:
    across, down = axes[0].share(point[0]), 1 - axes[1].share(point[1])
    return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + down * (HEIGHT - TOP - BOTTOM)


def _grid(axes: tuple[Axis, Axis]) -> list[str]:
    parts = []
    for value in axes[1].ticks:
        _, y = _place((axes[0].low, value), axes)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    for value in axes[0].ticks:
        x, _ = _place((value, axes[1].low), axes)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:.3g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(axes[0].name)}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 10}">{escape(axes[1].name)}</text>')
    return parts


def _line(line: Line, axes: tuple[Axis, Axis]) -> str:
    places = [_place(point, axes) for point in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = [f'<circle class="dot {line.style}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places]
    return f'<polyline class="{line.style}" points="{path}"/>' + ("".join(dots) if len(dots) <= 12 else "")


def _names(lines: Sequence[Line], axes: tuple[Axis, Axis]) -> list[str]:
    """To the right of the lines' right ends, pushed upwards where they would cover each other or the axis."""
    named = [line for line in lines if line.name]
    ends = sorted(((_place(max(line.points), axes)[1], line) for line in named), key=lambda end: -end[0])
    parts, highest = [], float(HEIGHT - BOTTOM - 4)
    for y, line in ends:
        highest = min(highest, y)
        parts.append(
            f'<text class="{line.style}" x="{WIDTH - RIGHT + 8}" y="{highest + 4:.1f}">{line.name}</text>'
        )
        highest -= 15
    return parts
