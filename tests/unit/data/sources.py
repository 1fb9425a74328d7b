"""Small sources to import: images of 64 x 48 pixels and the files around them."""

import json
from pathlib import Path

from PIL import Image

from coordexp.data import Record, read_records
from coordexp.data.importers import ImportCounts, Rules, read_coco, read_lvis, write_records

WIDTH, HEIGHT = 64, 48


def write_image(path: Path, size: tuple[int, int] = (WIDTH, HEIGHT), color: object = "white") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return path


def annotation(id=1, **changes):
    return {"id": id, "image_id": 1, "category_id": 1, "bbox": [8, 6, 16, 12], "iscrowd": 0} | changes


def coco(annotations, images=None, categories=None):
    return {
        "images": images or [{"id": 1, "file_name": "a.png", "width": WIDTH, "height": HEIGHT}],
        "categories": categories or [{"id": 1, "name": "cat"}],
        "annotations": annotations,
    }


def import_coco(folder: Path, document, reader=read_coco, **rules) -> tuple[list[Record], ImportCounts]:
    """Import a COCO or LVIS document, with a folder of images beside it."""
    (folder / "images").mkdir(exist_ok=True)
    source, counts = folder / "source.json", ImportCounts()
    source.write_text(document if isinstance(document, str) else json.dumps(document))
    images = reader(source, folder / "images", Rules(**{"missing": "keep"} | rules), counts)
    return write_and_read(folder, images, counts, **rules), counts


def import_lvis(folder: Path, document, **rules):
    return import_coco(folder, document, read_lvis, **rules)


def write_and_read(folder: Path, images, counts: ImportCounts, **rules) -> list[Record]:
    """Write the images of a reader as records and read these back."""
    write_records(images, folder / "out.jsonl", Rules(**{"missing": "keep"} | rules), counts, lambda number: None)
    return [record for _, record in read_records(folder / "out.jsonl")]


def count_reasons(counts: ImportCounts) -> dict[str, int]:
    return {f"{entry.effect}: {entry.reason}": entry.count for entry in counts.entries}


def list_shapes(records):
    return [(item.kind, item.coords) for record in records for item in record.objects]
