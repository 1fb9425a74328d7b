"""A clean set of 40 records with real images, and faults to plant in it, one at a time."""

import copy
import json
import random
from dataclasses import dataclass
from pathlib import Path

from tests.unit.data.sources import picture

WIDTH, HEIGHT = 96, 64
NAMES = ("red cup", "dog", "\u732b")


@dataclass
class Planted:
    """Rows are lines to be; a text is written as it is."""

    folder: Path
    rows: list

    def write(self) -> Path:
        file = self.folder / "train.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in self.rows]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file

    def boxes(self):
        return [found["bbox_2d"] for row in self.rows for found in row["objects"] if "bbox_2d" in found]

    def scale(self, x, y, space):
        """All coordinates times factors, said to be in a space."""
        for row in self.rows:
            row["space"] = space
            for found in row["objects"]:
                for values in (found[key] for key in found if key != "desc"):
                    values[:] = [value * (y if k % 2 else x) for k, value in enumerate(values)]


def clean(folder: Path) -> Planted:
    chooser = random.Random(7)
    rows = []
    for k in range(40):
        picture(folder / f"images/{k}.png", (WIDTH, HEIGHT), (k, 2 * k, 255 - k))
        objects = [{"desc": chooser.choice(NAMES), "bbox_2d": _box(chooser)} for _ in range(3)]
        x1, y1, x2, y2 = _box(chooser)
        objects.append({"desc": "leaf", "poly": [x1, y1, x2, y1, x2, y2]})
        rows.append(
            {"image": f"images/{k}.png", "width": WIDTH, "height": HEIGHT, "space": "pixel", "objects": objects}
        )
    rows[0]["objects"][0]["bbox_2d"] = [0, 0, WIDTH, HEIGHT]
    return Planted(folder, copy.deepcopy(rows))


def _box(chooser: random.Random) -> list[int]:
    width, height = chooser.randint(8, 40), chooser.randint(8, 30)
    x, y = chooser.randint(0, WIDTH - width), chooser.randint(0, HEIGHT - height)
    return [x, y, x + width, y + height]
