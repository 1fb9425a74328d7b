"""Rows: an image of a packed data set, and its labels as a JSON object. These forms are read:

    {"objects": {"bbox": [[8, 6, 16, 12]], "category": [3]}}                 Hugging Face: lists of equal lengths
    {"annotations": [{"bbox": [8, 6, 16, 12], "category_id": 3, "segmentation": [[...]]}]}                  COCO
    {"boxes": [{"bbox": [8, 6, 24, 18], "phrase": "red cup"}]}                                          Rex-Omni
    {"space": "pixel", "objects": [{"desc": "red cup", "bbox_2d": [8, 6, 24, 18]}], ...}        a record of ours

Whether the second two numbers of a `bbox` are a size or a corner is never guessed: `Rules.boxes` has to say it. A
row with a mistake is left out and counted, because of millions of rows some always have one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordexp.data.images import Source, read_image_size, size_problem
from coordexp.data.importers.coco import keep_id, read_rings
from coordexp.data.importers.source import (
    Dropped,
    ImportCounts,
    Ring,
    Rules,
    SourceImage,
    SourceObject,
    bounding_box,
    is_name,
    read_numbers,
)
from coordexp.data.records import parse_record
from coordexp.errors import DataError

Row = Mapping[str, Any]
Names = Mapping[int, str] | None  # of the classes, by number
LISTS = ("objects", "annotations", "boxes")  # keys that have the labels of a row
CLASSES = ("desc", "phrase", "category_name", "category", "categories", "label", "labels", "category_id")
SIZE_KEYS, ID_KEYS = ("width", "height"), ("image_id", "id")
RECORD_KEYS = ("classes", "expression", "prompt", "meta")  # of a record, which an import keeps


@dataclass(frozen=True)
class RowReader:
    """Reads rows by the choices of the user, and counts what is left out."""

    names: Names
    rules: Rules
    counts: ImportCounts

    def read(self, row: Row, address: str, image: Source, where: str) -> SourceImage:
        """Return the image of a row and its objects. `address` is that of the image in the record, and `image` is
        where its size is read if the row does not state it. Raise Dropped or ImageError if the row cannot be
        used."""
        if "space" in row:
            return _read_record(row, address, where)
        size: tuple[Any, Any] = row.get("width"), row.get("height")
        if not all(type(side) is int and side > 0 for side in size):
            size = read_image_size(image)
        _check_size(*size)
        labels = next((row[key] for key in LISTS if row.get(key) is not None), None)
        if labels is None:
            self.counts.add("noted", "image without labels", where)
        objects, crowds = list[SourceObject](), set[str]()
        for number, label in enumerate(_list_labels(labels or []), start=1):
            place = f"{where}, object {number}"
            with self.counts.dropping(place):
                item = self._read_label(label, size, place)
                if label.get("iscrowd") and self.rules.crowd == "drop":
                    crowds.add(item.desc)
                    raise Dropped("crowd (--crowd drop)")
                objects.append(item)
        complete = None
        if crowds:  # they leave objects of their classes without a label
            known = self.names.values() if self.names else [item.desc for item in objects]
            complete = tuple(dict.fromkeys(name for name in known if name not in crowds))
        id = next((row[key] for key in ID_KEYS if row.get(key) is not None), None)
        image_id = None if id is None else keep_id(id, "image", self.counts)
        return SourceImage(address, *size, tuple(objects), image_id, complete)

    def _read_label(self, label: Any, size: tuple[int, int], where: str) -> SourceObject:
        if not isinstance(label, dict):
            raise Dropped("label that is not a JSON object")
        classes = [label[key] for key in CLASSES if label.get(key) is not None]
        number = next((value for value in classes if type(value) is int), None)
        name = next((value for value in classes if isinstance(value, str)), None)
        if name is None and number is not None:
            if self.names is None:
                problem = f"{where}: the class {number} has no name"
                raise DataError(problem, "give the names of the classes with --names")
            name = self.names.get(number)
        if not is_name(name):
            raise Dropped("object of a class without a name")
        numbers, box = read_numbers(label.get("bbox")), None
        if numbers is not None and len(numbers) == 4:
            x, y, right, bottom = numbers
            if self.rules.boxes is None:
                raise DataError(
                    f"{where}: nothing says whether the last two numbers of a bbox are a size or a corner",
                    "add --boxes xywh (as in COCO) or --boxes xyxy (two corners)",
                )
            box = (x, y, right, bottom) if self.rules.boxes == "xyxy" else (x, y, x + right, y + bottom)
        rings = list[Ring]()
        if self.rules.geometry != "box" or box is None:
            rings = read_rings(label.get("segmentation"), size, where, self.counts)
        category_id = None if number is None else keep_id(number, "category", self.counts)
        return SourceObject(name, where, box, tuple(rings), category_id)


def _check_size(width: int, height: int) -> None:
    if size_problem(width, height):
        raise Dropped("image of a size that no model accepts")


def _read_record(row: Row, address: str, where: str) -> SourceImage:
    try:
        record = parse_record(json.dumps({**row, "image": "-"}))
    except ValueError as error:
        raise Dropped("record that breaks a rule of records") from error
    _check_size(record.width, record.height)
    objects = []
    for item in record.objects:
        coords = record.in_pixels(item)
        box, rings = (bounding_box([coords]), ()) if item.kind == "bbox_2d" else (None, (coords,))
        objects.append(SourceObject(item.desc, where, box, rings, item.category_id, item.meta))
    request = {key: getattr(record, key) for key in RECORD_KEYS}
    head = (tuple(objects), record.image_id, record.exhaustive)
    return SourceImage(address, record.width, record.height, *head, request)


def _list_labels(labels: Any) -> list[Any]:
    """Return the labels one by one, also if each of their keys has a list."""
    if isinstance(labels, dict):
        columns = {key: values for key, values in labels.items() if isinstance(values, list)}
        if len(set(map(len, columns.values()))) > 1:
            raise Dropped("labels whose lists have different lengths")
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if not isinstance(labels, list):
        raise Dropped("labels that are not a list")
    return labels
