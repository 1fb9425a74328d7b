"""Draw the figure of the README, F1 over the share of missing labels, from the table in docs/results.md.

    python tools/results_figure.py

The table is the one whose first column is "labels missing". Its other columns become lines.
"""

import re
from pathlib import Path

from line_chart import Axes, draw

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/results.md"
FIGURE = ROOT / "docs/images/missing-labels.svg"
FIRST_COLUMN = "labels missing"
TITLE = "F1@0.5 on drawn test scenes with all labels"


def read_table(page: str) -> tuple[list[str], list[list[float]]]:
    """Return the names of the columns and the rows of the table, as numbers."""
    lines = page[page.index(f"| {FIRST_COLUMN} |") :].splitlines()
    names = split_cells(lines[0])
    rows = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        rows.append([float(re.sub(r"[^\d.]", "", cell.partition("±")[0])) for cell in split_cells(line)])
    return names, rows


def split_cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]


def draw_figure(page: str) -> str:
    """Return the figure for the text of docs/results.md."""
    (_, *names), rows = read_table(page)
    curves = [[(row[0], row[k]) for row in rows] for k in range(1, len(names) + 1)]
    axes = Axes(
        across=[row[0] for row in rows],
        up=(0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        unit=" %",
        name="labels missing in training",
        show_values=True,
    )
    return draw(names, {TITLE: curves}, axes)


if __name__ == "__main__":
    FIGURE.write_text(draw_figure(PAGE.read_text()))
