"""Draw the quality of rollouts over the steps of several runs as an SVG: recall and precision of the rollouts, the
share with too few objects, and the share with too many. Each is smoothed over 8 steps with rollouts.

    python tools/rollout_curves.py OUT.svg NAME=RUN_FOLDER [NAME=RUN_FOLDER ...]
"""

import argparse
import json
from pathlib import Path

from line_chart import Axes, Points, draw

PANELS = {
    "match/recall": "recall of the answers",
    "match/precision": "precision of the answers",
    "rollout/under_count_rate": "too few objects",
    "rollout/over_count_rate": "too many objects",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN_FOLDER")
    options = parser.parse_args()
    runs = {name: read_metrics(Path(folder)) for name, _, folder in (text.partition("=") for text in options.runs)}
    panels = {title: [smooth(lines, name) for lines in runs.values()] for name, title in PANELS.items()}
    last = max(line["step"] for lines in runs.values() for line in lines)
    options.out.write_text(draw(list(runs), panels, Axes((0, last / 2, last))))


def read_metrics(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "rollout/answers" in line]


def smooth(lines: list[dict[str, float]], name: str, window: int = 8) -> Points:
    points = [(line["step"], line[name]) for line in lines if name in line]
    return [
        (points[k][0], sum(value for _, value in points[max(0, k + 1 - window) : k + 1]) / min(window, k + 1))
        for k in range(len(points))
    ]


if __name__ == "__main__":
    main()
