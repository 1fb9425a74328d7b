"""Line charts as inline SVG: precision against recall, and precision, recall and F1 against the score threshold.

Lines differ in dashes as well as in colour, and each has its name at its end. Colours come from the page's style,
so that the charts work in light and in dark mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from operator import itemgetter

from coordexp.evaluate.curve import CurvePoint, best_point, thin_curve

WIDTH, HEIGHT = 440, 280
LEFT, RIGHT, TOP, BOTTOM = 46, 74, 26, 42

TITLES = {"precision": "precision", "recall": "recall", "f1": "F1"}

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """`style` is a CSS class that sets the colour and the dashes."""

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


def draw_precision_recall(points: Sequence[CurvePoint]) -> str:
    shown = [(point.counts.recall or 0.0, point.counts.precision or 0.0) for point in thin_curve(points)]
    best = best_point(points)
    assert best is not None
    mark = (best.counts.recall or 0.0, best.counts.precision or 0.0)
    axes = Axis("recall", 0.0, 1.0), Axis("precision", 0.0, 1.0)
    return _draw_lines(
        "Precision against recall", axes, [Line("", "line-f1", tuple(shown))], mark, _describe_best(best)
    )


def draw_thresholds(points: Sequence[CurvePoint]) -> str:
    shown = thin_curve(points)
    best = best_point(points)
    assert best is not None
    lines = [
        Line(
            TITLES[name],
            f"line-{name}",
            tuple((point.score, getattr(point.counts, name) or 0.0) for point in shown),
        )
        for name in TITLES
    ]
    axes = Axis("score threshold", points[-1].score, points[0].score), Axis("", 0.0, 1.0)
    title = "Precision, recall and F1 against the score threshold"
    return _draw_lines(title, axes, lines, (best.score, best.counts.f1 or 0.0), _describe_best(best))


def _draw_lines(title: str, axes: tuple[Axis, Axis], lines: Sequence[Line], mark: Point, words: str) -> str:
    """Return a line chart with a ring around the point `mark`. `words` are its tooltip and the caption."""
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts += _draw_grid(axes)
    parts += [_draw_line(line, axes) for line in lines]
    parts += _draw_names(lines, axes)
    x, y = _to_pixels(mark, axes)
    parts.append(f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>{escape(words)}</title></circle>')
    svg = "\n".join([*parts, "</svg>"])
    return f"<figure><h3>{escape(title)}</h3>\n{svg}\n<figcaption>{escape(words)}</figcaption></figure>"


def _describe_best(best: CurvePoint) -> str:
    return f"Ring: best F1 {best.counts.f1 or 0.0:.3f}, keeping objects with a score of at least {best.score:.3g}"


def _to_pixels(point: Point, axes: tuple[Axis, Axis]) -> Point:
    across, down = axes[0].share(point[0]), 1 - axes[1].share(point[1])
    return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + down * (HEIGHT - TOP - BOTTOM)


def _draw_grid(axes: tuple[Axis, Axis]) -> list[str]:
    parts = []
    for value in axes[1].ticks:
        _, y = _to_pixels((axes[0].low, value), axes)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    for value in axes[0].ticks:
        x, _ = _to_pixels((value, axes[1].low), axes)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:.3g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(axes[0].name)}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 10}">{escape(axes[1].name)}</text>')
    return parts


def _draw_line(line: Line, axes: tuple[Axis, Axis]) -> str:
    places = [_to_pixels(point, axes) for point in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = [f'<circle class="dot {line.style}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places]
    return f'<polyline class="{line.style}" points="{path}"/>' + ("".join(dots) if len(dots) <= 12 else "")


def _draw_names(lines: Sequence[Line], axes: tuple[Axis, Axis]) -> list[str]:
    """Write the names to the right of the lines, moved up where they would cover each other or the axis."""
    named = [line for line in lines if line.name]
    ends = sorted(
        ((_to_pixels(max(line.points), axes)[1], line) for line in named), key=itemgetter(0), reverse=True
    )
    parts, highest = [], float(HEIGHT - BOTTOM - 4)
    for y, line in ends:
        highest = min(highest, y)
        parts.append(
            f'<text class="{line.style}" x="{WIDTH - RIGHT + 8}" y="{highest + 4:.1f}">{line.name}</text>'
        )
        highest -= 15
    return parts
