"""Line charts for the documentation, as SVG files that look the same on any page and need no style sheet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil

WIDTH, HEIGHT, GAP, TOP, BOTTOM = 380, 230, 46, 20, 40  # of a panel, and around it
STYLES = (  # colours and dashes
    *(("#1f5fbf", ""), ("#b3541e", "7 3"), ("#2e8b57", "2 3"), ("#7a3fa0", "8 3 2 3")),
    *(("#a8324a", "12 3"), ("#3c7d86", "4 2"), ("#7d6b1f", "1 3"), ("#555555", "10 2 2 2 2 2")),
)
LABEL_HEIGHT = 12
NAMES_PER_COLUMN, NAME_WIDTH, NAME_HEIGHT = 2, 200, 20
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axes:
    """The places of the ticks from left to right and from bottom to top. Lines end at the first and the last. With
    `show_values`, every point has its value beside it."""

    across: Sequence[float]
    up: Sequence[float] = (0, 0.2, 0.4, 0.6, 0.8, 1)
    unit: str = ""  # of the ticks from left to right
    name: str = ""  # of the axis from left to right
    show_values: bool = False


def draw(names: Sequence[str], panels: Mapping[str, Sequence[Points]], axes: Axes | Mapping[str, Axes]) -> str:
    """Return an SVG with a legend and, for each title, a panel with one curve per name. All panels have the same
    axes, or each has those of its title."""
    own_axes = {title: axes if isinstance(axes, Axes) else axes[title] for title in panels}
    columns = min(2, len(panels))
    names_per_row = NAMES_PER_COLUMN * columns
    legend = NAME_HEIGHT * ceil(len(names) / names_per_row)
    below = BOTTOM + (NAME_HEIGHT if any(own.name for own in own_axes.values()) else 0)
    size = (columns * WIDTH + (columns + 1) * GAP, ceil(len(panels) / columns) * (HEIGHT + below) + legend + TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" '
        f'font-size="12"><rect width="{size[0]}" height="{size[1]}" fill="white"/>'
    ]
    for k, name in enumerate(names):
        row, column = divmod(k, names_per_row)
        x, y = GAP + NAME_WIDTH * column, 16 + NAME_HEIGHT * row
        parts.append(
            f'<path d="M{x} {y}h28" {line_style(k)}/><text x="{x + 34}" y="{y + 4}">{escape(name)}</text>'
        )
    for k, (title, curves) in enumerate(panels.items()):
        left, top = GAP + (k % columns) * (WIDTH + GAP), legend + TOP + (k // columns) * (HEIGHT + below)
        parts += draw_panel(left, top, title, curves, own_axes[title])
    return "".join(parts) + "</svg>\n"


def draw_panel(left: float, top: float, title: str, curves: Sequence[Points], axes: Axes) -> list[str]:
    """Return the parts of one panel, whose title begins at `left` and `top`."""
    first, last, low, high = axes.across[0], axes.across[-1], axes.up[0], axes.up[-1]

    def x(value: float) -> float:
        return left + WIDTH * (value - first) / (last - first)

    def y(value: float) -> float:
        return top + 20 + (HEIGHT - 20) * (high - value) / (high - low)

    parts = [f'<text x="{left}" y="{top + 12}" font-weight="bold">{escape(title)}</text>']
    for tick in axes.up:
        parts.append(f'<path d="M{left} {y(tick):.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in axes.across:
        label = f"{tick:g}{axes.unit}"
        parts.append(f'<text x="{x(tick):.0f}" y="{top + HEIGHT + 16}" text-anchor="middle">{label}</text>')
    if axes.name:
        place = f'x="{left + WIDTH / 2:.0f}" y="{top + HEIGHT + 16 + NAME_HEIGHT}"'
        parts.append(f'<text {place} text-anchor="middle">{escape(axes.name)}</text>')
    for k, points in enumerate(curves):
        places = " ".join(f"{x(across):.1f},{y(value):.1f}" for across, value in points)
        parts.append(f'<polyline points="{places}" {line_style(k)}/>')
    if axes.show_values:
        parts += draw_values([[(x(across), y(value), value) for across, value in points] for points in curves])
    return parts


def draw_values(curves: Sequence[Sequence[tuple[float, float, float]]]) -> list[str]:
    """Return a dot at every point, given as its place and its value, and the value below it, to its left. A value
    that would hide another one is left out."""
    parts, written = [], list[tuple[float, float]]()
    first = min(x for curve in curves for x, _, _ in curve)
    for k, curve in enumerate(curves):
        colour, _ = STYLES[k % len(STYLES)]
        for x, y, value in curve:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
            if any(x == other_x and abs(y - other_y) < 2 * LABEL_HEIGHT for other_x, other_y in written):
                continue
            written.append((x, y))
            anchor = f'x="{x - 3:.1f}" text-anchor="end"' if x > first else f'x="{x + 3:.1f}"'
            parts.append(f'<text {anchor} y="{y + LABEL_HEIGHT + 2:.1f}" fill="{colour}">{value:.2f}</text>')
    return parts


def line_style(number: int) -> str:
    colour, dashes = STYLES[number % len(STYLES)]
    return f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
