"""Draw the quality of rollouts over the steps of several runs as an SVG: recall and precision of the rollouts, the
share that stopped early, and the share with too many objects. Each is smoothed over 8 steps with rollouts.

    python tools/rollout_curves.py OUT.svg NAME=RUN_FOLDER [NAME=RUN_FOLDER ...]
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from html import escape
from math import ceil
from pathlib import Path

WIDTH, HEIGHT, GAP, TOP, BOTTOM = 380, 230, 46, 20, 40
PANELS = {
    "match/recall": "recall of the answers",
    "match/precision": "precision of the answers",
    "rollout/early_stop_rate": "stopped early",
    "rollout/over_count_rate": "too many objects",
}
STYLES = (
    *(("#1f5fbf", ""), ("#b3541e", "7 3"), ("#2e8b57", "2 3"), ("#7a3fa0", "8 3 2 3")),
    *(("#a8324a", "12 3"), ("#3c7d86", "4 2"), ("#7d6b1f", "1 3"), ("#555555", "10 2 2 2 2 2")),
)
NAMES_PER_ROW, NAME_WIDTH, NAME_HEIGHT = 4, 200, 20
Points = list[tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN_FOLDER")
    options = parser.parse_args()
    runs = {name: read_metrics(Path(folder)) for name, _, folder in (text.partition("=") for text in options.runs)}
    panels = {title: [smooth(lines, name) for lines in runs.values()] for name, title in PANELS.items()}
    options.out.write_text(
        draw(list(runs), panels, max(line["step"] for lines in runs.values() for line in lines))
    )


def read_metrics(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "rollout/answers" in line]


def smooth(lines: list[dict[str, float]], name: str, window: int = 8) -> Points:
    points = [(line["step"], line[name]) for line in lines if name in line]
    return [
        (points[k][0], sum(value for _, value in points[max(0, k + 1 - window) : k + 1]) / min(window, k + 1))
        for k in range(len(points))
    ]


def draw(names: Sequence[str], panels: Mapping[str, Sequence[Points]], last_step: float) -> str:
    """Return an SVG with a legend and, for each title, a panel with one curve per name. All values are shares."""
    legend = NAME_HEIGHT * ceil(len(names) / NAMES_PER_ROW)
    size = (2 * WIDTH + 3 * GAP, ceil(len(panels) / 2) * (HEIGHT + BOTTOM) + legend + TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" '
        f'font-size="12"><rect width="{size[0]}" height="{size[1]}" fill="white"/>'
    ]
    for k, name in enumerate(names):
        colour, dashes = STYLES[k % len(STYLES)]
        x, y = GAP + NAME_WIDTH * (k % NAMES_PER_ROW), 16 + NAME_HEIGHT * (k // NAMES_PER_ROW)
        parts.append(
            f'<line x1="{x}" x2="{x + 28}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dashes}"/><text x="{x + 34}" y="{y + 4}">{escape(name)}</text>'
        )
    for k, (title, curves) in enumerate(panels.items()):
        left, top = GAP + (k % 2) * (WIDTH + GAP), legend + TOP + (k // 2) * (HEIGHT + BOTTOM)
        parts += draw_panel(left, top, title, last_step, curves)
    return "".join(parts) + "</svg>\n"


def draw_panel(left: float, top: float, title: str, last_step: float, curves: Sequence[Points]) -> list[str]:
    height = HEIGHT - 20
    parts = [f'<text x="{left}" y="{top + 12}" font-weight="bold">{escape(title)}</text>']
    for tenth in range(0, 11, 2):
        y = top + 20 + height * (1 - tenth / 10)
        parts.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tenth / 10}</text>')
    for share in (0, 0.5, 1):
        x = left + WIDTH * share
        parts.append(
            f'<text x="{x:.0f}" y="{top + HEIGHT + 16}" text-anchor="middle">{last_step * share:.0f}</text>'
        )
    for k, points in enumerate(curves):
        colour, dashes = STYLES[k % len(STYLES)]
        coordinates = " ".join(
            f"{left + WIDTH * step / last_step:.1f},{top + 20 + height * (1 - value):.1f}"
            for step, value in points
        )
        parts.append(
            f'<polyline points="{coordinates}" fill="none" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{dashes}"/>'
        )
    return parts


if __name__ == "__main__":
    main()
