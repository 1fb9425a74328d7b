"""Draw the learning curve of a run as an SVG: the results of its evaluations over minutes.

python tools/curve.py RUN_FOLDER OUT.svg [--goal 0.85]
"""

import argparse
import json
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 52, 190, 24, 44
LINES = {
    "eval_f1_50": ("F1 at IoU 0.5", "#1f5fbf", ""),
    "eval_f1_50_any_class": ("the same, any class", "#2e8b57", "6 3"),
    "eval_recall_50": ("recall", "#b3541e", "2 3"),
    "eval_ap": ("COCO AP", "#7a3fa0", "8 3 2 3"),
}
Points = list[tuple[float, float]]


def read_curves(folder: Path) -> dict[str, Points]:
    curves: dict[str, Points] = {name: [] for name in LINES}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        for name in LINES:
            if name in values:
                curves[name].append((values["seconds"] / 60, values[name]))
    return curves


def draw(curves: dict[str, Points], title: str, goal: float | None) -> str:
    last_minute = max(minute for points in curves.values() for minute, _ in points)
    step = next(s for s in (1, 2, 5, 10, 20, 50) if last_minute / s <= 10)

    def x(minute: float) -> float:
        return LEFT + minute / last_minute * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/><text x="{LEFT}" y="15">{escape(title)}</text>',
    ]
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tenth / 10}</text>')
    for minute in range(0, int(last_minute) + 1, step):
        parts.append(f'<text x="{x(minute):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{minute}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">minutes</text>')
    if goal is not None:
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(goal):.1f}" y2="{y(goal):.1f}" stroke="#888" '
            f'stroke-dasharray="1 4"/><text x="{LEFT + 4}" y="{y(goal) - 4:.1f}" fill="#555">goal {goal}</text>'
        )
    for row, (name, (label, colour, dashes)) in enumerate(LINES.items()):
        points = " ".join(f"{x(minute):.1f},{y(value):.1f}" for minute, value in curves[name])
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
        at = TOP + 20 + 22 * row
        parts.append(f'<polyline points="{points}" {style}/>')
        parts.append(f'<path d="M{WIDTH - RIGHT + 12} {at} h26" {style}/>')
        last = f" {curves[name][-1][1]:.3f}" if curves[name] else ""
        parts.append(f'<text x="{WIDTH - RIGHT + 44}" y="{at + 4}">{label}{last}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--title", default="Held-out scenes")
    parser.add_argument("--goal", type=float)
    options = parser.parse_args()
    options.out.write_text(draw(read_curves(options.folder), options.title, options.goal))


if __name__ == "__main__":
    main()
