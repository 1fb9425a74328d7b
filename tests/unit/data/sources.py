"""Small sources to import: pictures of 64 x 48 pixels and the files around them."""

import json
from pathlib import Path

from PIL import Image

from coordexp.data import Record, read_records
from coordexp.data.images import image_size
from coordexp.data.importers import Rules, Tally, read_coco, read_lvis, write_records

WIDTH, HEIGHT = 64, 48


def picture(path: Path, size: tuple[int, int] = (WIDTH, HEIGHT), color: object = "white") -> Path:
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


def imported(folder: Path, document, reader=read_coco, **rules) -> tuple[list[Record], Tally]:
    """A COCO or LVIS document through the importer, beside a folder of images."""
    (folder / "images").mkdir(exist_ok=True)
    source, target, tally = folder / "source.json", folder / "out.jsonl", Tally()
    source.write_text(document if isinstance(document, str) else json.dumps(document))
    chosen = Rules(**{"missing": "keep"} | rules)
    write_records(
        reader(source, folder / "images", chosen, tally, image_size), target, chosen, tally, lambda n: None
    )
    return [record for _, record in read_records(target)], tally


def imported_lvis(folder: Path, document, **rules):
    return imported(folder, document, read_lvis, **rules)


def collected(folder: Path, images, tally: Tally, **rules) -> list[Record]:
    """What another reader gives, written and read back."""
    chosen = Rules(**{"missing": "keep"} | rules)
    write_records(images, folder / "out.jsonl", chosen, tally, lambda n: None)
    return [record for _, record in read_records(folder / "out.jsonl")]


def counts(tally: Tally) -> dict[str, int]:
    return {f"{entry.effect}: {entry.reason}": entry.count for entry in tally.entries}


def shapes(records):
    return [(found.kind, found.coords) for record in records for found in record.objects]
