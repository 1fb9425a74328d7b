"""Scenes on disk: images, records to train on, and the same as COCO files for other tools."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coordexp.data import Record, RecordObject
from coordexp.demo.scenes import COLOURS, COMMON, RARE, SceneSettings, scenes

CLASSES = sorted(f"{colour} {shape}" for colour in COLOURS for shape in (*COMMON, *RARE))


def write_scenes(
    folder: Path,
    settings: SceneSettings,
    *,
    train: int,
    val: int,
    seed: int,
    advance: Callable[[], None],
) -> None:
    """`train.jsonl`, `val.jsonl`, `*.coco.json` and `images/`. The held-out scenes have seeds of their own."""
    for part, count, own_seed in (("train", train, 2 * seed), ("val", val, 2 * seed + 1)):
        (folder / "images" / part).mkdir(parents=True)
        records = []
        for scene in scenes(count, settings, seed=own_seed, folder=f"images/{part}"):
            scene.image.save(folder / scene.record.image)
            records.append(scene.record)
            advance()
        lines = "".join(record.as_json() + "\n" for record in records)
        (folder / f"{part}.jsonl").write_text(lines, encoding="utf-8")
        (folder / f"{part}.coco.json").write_text(json.dumps(as_coco(records)))


def as_coco(records: Sequence[Record]) -> dict[str, Any]:
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, record in enumerate(records, start=1):
        images.append({"id": number, "file_name": record.image, "width": record.width, "height": record.height})
        for found in record.objects:
            annotations.append(_annotation(len(annotations) + 1, number, record, found))
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES, start=1)]
    return {"images": images, "annotations": annotations, "categories": categories}


def _annotation(number: int, image: int, record: Record, found: RecordObject) -> dict[str, Any]:
    coords = record.in_pixels(found)
    xs, ys = coords[::2], coords[1::2]
    x, y, width, height = min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)
    ring = list(coords) if found.kind == "poly" else [x, y, x + width, y, x + width, y + height, x, y + height]
    return {
        "id": number,
        "image_id": image,
        "category_id": CLASSES.index(found.desc) + 1,
        "bbox": [x, y, width, height],
        "segmentation": [ring] if found.kind == "poly" else [],
        "area": _area(ring),
        "iscrowd": 0,
    }


def _area(ring: Sequence[float]) -> float:
    xs, ys = ring[::2], ring[1::2]
    ahead = zip(xs, ys, [*xs[1:], xs[0]], [*ys[1:], ys[0]], strict=True)
    return abs(sum(x * ny - nx * y for x, y, nx, ny in ahead)) / 2
