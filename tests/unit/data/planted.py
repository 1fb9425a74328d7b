"""A clean data file of 40 records with real images, in which tests plant one mistake at a time."""

import copy
import json
import random
from dataclasses import dataclass
from pathlib import Path

from tests.unit.data.sources import write_image

WIDTH, HEIGHT = 96, 64
NAMES = ("red cup", "dog", "\u732b")


@dataclass
class Planted:
    """Rows of a data file to be. A row that is a text is written unchanged."""

    folder: Path
    rows: list

    def write(self) -> Path:
        file = self.folder / "train.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in self.rows]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return file

    def boxes(self):
        return [item["bbox_2d"] for row in self.rows for item in row["objects"] if "bbox_2d" in item]

    def scale(self, x, y, space):
        """Multiply all coordinates by factors and state another space."""
        for row in self.rows:
            row["space"] = space
            for item in row["objects"]:
                for values in (item[key] for key in item if key != "desc"):
                    values[:] = [value * (y if k % 2 else x) for k, value in enumerate(values)]


def write_clean(folder: Path) -> Planted:
    rng = random.Random(7)
    rows = []
    for k in range(40):
        write_image(folder / f"images/{k}.png", (WIDTH, HEIGHT), (k, 2 * k, 255 - k))
        objects = [{"desc": rng.choice(NAMES), "bbox_2d": _box(rng)} for _ in range(3)]
        x1, y1, x2, y2 = _box(rng)
        objects.append({"desc": "leaf", "poly": [x1, y1, x2, y1, x2, y2]})
        rows.append(
            {"image": f"images/{k}.png", "width": WIDTH, "height": HEIGHT, "space": "pixel", "objects": objects}
        )
    rows[0]["objects"][0]["bbox_2d"] = [0, 0, WIDTH, HEIGHT]
    return Planted(folder, copy.deepcopy(rows))


def _box(rng: random.Random) -> list[int]:
    width, height = rng.randint(8, 40), rng.randint(8, 30)
    x, y = rng.randint(0, WIDTH - width), rng.randint(0, HEIGHT - height)
    return [x, y, x + width, y + height]
