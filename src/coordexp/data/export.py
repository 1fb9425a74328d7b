"""Write records in the formats of other tools: COCO instances as one JSON document, YOLO as a folder of texts.

Files are read more than once and written as they are read, so memory grows only with the number of images and
classes.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from coordexp.data.addresses import is_file, is_url
from coordexp.data.records import Record, RecordObject, read_records
from coordexp.errors import DataError, UserError, explain
from coordexp.files import is_free, write_parts, write_whole

DIGITS = 9  # of a number in units of the image; a thousandth of a pixel needs seven


@dataclass(frozen=True)
class ExportReport:
    images: int
    objects: int
    classes: int


def number_classes(objects: Iterable[RecordObject]) -> dict[str, int]:
    """Return the number of every class, by its desc: the smallest `category_id` that its objects have. Classes
    without one get the next free numbers, in the order of their descs, so objects without any id are numbered
    from 1. Raise DataError if two classes share an id."""
    names: set[str] = set()
    given: dict[str, int] = {}
    for item in objects:
        names.add(item.desc)
        if item.category_id is not None:
            given[item.desc] = min(item.category_id, given.get(item.desc, item.category_id))
    descs: dict[int, str] = {}
    for desc, number in given.items():
        if descs.setdefault(number, desc) != desc:
            raise DataError(
                f"category_id {number} is used for the class {descs[number]!r} and for the class {desc!r}",
                "give every class its own id, or remove category_id from all records",
            )
    free = itertools.count(max(descs, default=0) + 1)
    return {desc: given[desc] if desc in given else next(free) for desc in sorted(names)}


def export_coco(path: Path, target: Path, images: Path, notify: Callable[[str], None]) -> ExportReport:
    """Write a COCO document. An image has the `image_id` of its record, or else the number of its line; its file
    name is relative to the folder `images`."""
    classes = number_classes(_read_objects(path, notify))
    seen: dict[int, int] = {}
    objects = 0
    with write_parts(target) as write:
        categories = [{"id": classes[desc], "name": desc} for desc in sorted(classes, key=classes.__getitem__)]
        write(b'{"categories": ' + _to_json(categories) + b',\n"images": [')
        for line, record in read_records(path):
            image_id = line if record.image_id is None else record.image_id
            if image_id in seen:
                raise DataError(
                    f"{path}:{line}: the image_id {image_id} is that of line {seen[image_id]} too (a record "
                    "without an image_id has the number of its line)",
                    "give every record an image_id of its own, or remove image_id from all of them",
                )
            image = {"id": image_id, "file_name": _name_in(images, path, line, record)}
            write(b",\n" if seen else b"\n")
            write(_to_json(image | {"width": record.width, "height": record.height}))
            seen[image_id] = line
        write(b'],\n"annotations": [')
        for line, record in read_records(path):
            image_id = line if record.image_id is None else record.image_id
            for item in record.objects:
                objects += 1
                ids = {"id": objects, "image_id": image_id, "category_id": classes[item.desc]}
                write(b",\n" if objects > 1 else b"\n")
                write(_to_json(ids | to_annotation(record, item)))
            notify(f"line {line:,}")
        write(b"]}\n")
    return ExportReport(len(seen), objects, len(classes))


def export_yolo(
    path: Path, target: Path, images: Path, notify: Callable[[str], None], val: Path | None = None
) -> ExportReport:
    """Write a folder with `data.yaml`, a text file for each image below `labels`, and a link to each image below
    `images`, as Ultralytics expects them. Classes are numbered from 0, in the order of their COCO numbers.

    With `val`, there are two splits. Ultralytics finds the labels of an image by replacing the last folder
    `images` of its path, so the names of links have no such folder."""
    if not is_free(target):
        raise UserError(f"{target} exists and is not an empty folder", "give another one, or remove it")
    files = {"train": path, "val": val} if val else {"": path}
    numbers = number_classes(item for source in files.values() for item in _read_objects(source, notify))
    order = sorted(numbers, key=numbers.__getitem__)
    classes = {desc: k for k, desc in enumerate(order)}
    lines: dict[str, int] = {}
    objects = 0
    all_records = ((split, source, *entry) for split, source in files.items() for entry in read_records(source))
    for split, source, line, record in all_records:
        if not is_file(record.image):
            raise DataError(
                f"{source}:{line}: {record.image} is not a file of its own, and Ultralytics reads files",
                "export COCO, which only names images, or write the images to files first",
            )
        *folders, file_name = PurePosixPath(_name_in(images, source, line, record)).parts
        name = PurePosixPath(split, *(folder for folder in folders if folder != "images"), file_name)
        label = name.with_suffix(".txt").as_posix()
        if label in lines:
            raise DataError(
                f"{source}:{line}: {record.image} and the image of line {lines[label]} would share {label}",
                "put all objects of an image into one record, and give images different names",
            )
        lines[label] = line
        file, link = target / "labels" / label, target / "images" / name
        for folder in (file.parent, link.parent):
            folder.mkdir(parents=True, exist_ok=True)
        lines_of_record = (f"{_to_yolo(record, item, classes)}\n" for item in record.objects)
        file.write_text("".join(lines_of_record), encoding="utf-8")
        fix = "give --out on a file system that has links"
        with explain(OSError, f"{link} cannot be made", fix, to=UserError):
            link.symlink_to((source.parent / record.image).resolve())
        objects += len(record.objects)
        notify(f"line {line:,}")
    splits = [str(PurePosixPath("images", split)) for split in files]
    facts = {"path": str(target.resolve()), "train": splits[0], "val": splits[-1], "names": dict(enumerate(order))}
    write_whole(target / "data.yaml", yaml.safe_dump(facts, sort_keys=False, allow_unicode=True))
    return ExportReport(len(lines), objects, len(classes))


def _read_objects(path: Path, notify: Callable[[str], None]) -> Iterator[RecordObject]:
    for line, record in read_records(path):
        notify(f"classes, line {line:,}")
        yield from record.objects


def _name_in(images: Path, path: Path, line: int, record: Record) -> str:
    """Return the name of an image relative to the folder of images. Links in its path are kept. A URL is kept."""
    if is_url(record.image):
        return record.image
    name = Path(os.path.relpath(path.parent / record.image, images))
    if name.parts[:1] == ("..",):
        raise DataError(
            f"{path}:{line}: {record.image} is not below the folder of images, {images}",
            "give a folder that has all images below it with --images",
        )
    return name.as_posix()


def to_annotation(record: Record, item: RecordObject) -> dict[str, Any]:
    """Return an object as COCO has it. The area of a polygon is that of its mask, as in COCO."""
    from pycocotools import mask as rle

    coords = [round(value, 3) for value in record.in_pixels(item)]
    xs, ys = coords[::2], coords[1::2]
    width, height = max(xs) - min(xs), max(ys) - min(ys)
    area, rings = width * height, list[list[float]]()
    if item.kind == "poly":
        rings = [coords]
        area = float(rle.area(rle.frPyObjects(rings, record.height, record.width)).sum())
    box = [min(xs), min(ys), round(width, 3), round(height, 3)]
    return {"bbox": box, "area": round(area, 3), "iscrowd": 0, "segmentation": rings}


def _to_yolo(record: Record, item: RecordObject, classes: dict[str, int]) -> str:
    """Return an object as a line of YOLO, clipped to the image: Ultralytics ignores all labels of an image if one
    of them is outside."""
    extent = record.extent
    coords = [min(1.0, max(0.0, value / extent[k % 2])) for k, value in enumerate(item.coords)]
    if item.kind == "bbox_2d":
        x1, y1, x2, y2 = coords
        coords = [(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]
    return " ".join([str(classes[item.desc]), *(f"{value:.{DIGITS}f}" for value in coords)])


def _to_json(value: Any) -> bytes:
    """Return a value as JSON. A name of a file that is not text stays an escape."""
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace")
