"""Read Label Studio's JSON export: a list of tasks, each with an image and its annotations.

Of the annotations of a task that were not cancelled, the latest counts. A rectangle becomes a box, a rotated one a
polygon of four vertices. Regions of other types and regions without a label are dropped and counted.

Tasks that `coordexp data export labelstudio` wrote have the keys of their record under `coordexp` in their `data`.
Other tasks have the address of an image. Its file is the path after `?d=` (local storage), or else the last part
of the address, without the eight characters that Label Studio puts before the name of an uploaded file.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from coordexp.data.importers.source import (
    ImportCounts,
    Ring,
    SizeOf,
    SourceImage,
    SourceObject,
    check_name,
    read_missing_size,
    read_numbers,
    resolve_image,
)
from coordexp.data.records import LARGEST_ID, Record, parse_record
from coordexp.errors import DataError, explain
from coordexp.files import read_file

JsonObject = dict[str, Any]
SHAPES = ("rectanglelabels", "polygonlabels")
ROTATED = 1e-6  # degrees from which a rectangle counts as rotated
_UPLOADED = re.compile(r"^[0-9a-f]{8}-(?=.)")
_FIX = "export the project as JSON (not JSON-MIN), and give that file"


def read_labelstudio(
    path: Path, images: Path, key: str, counts: ImportCounts, size_of: SizeOf
) -> Iterator[SourceImage]:
    """Yield the images in the order of the tasks. `key` is the name of the image in the data of a task."""
    tasks = _load_tasks(path)
    ids = _collect_category_ids(tasks)
    for number, task in enumerate(tasks):
        where = f"task {task.get('id', f'no {number + 1}')}"
        annotation = _choose_annotation(task, where, counts)
        if annotation is None:
            continue
        regions, record = annotation["result"], _read_record(task["data"], where)
        name = record.image if record else _file_name(task["data"], key, where)
        file = resolve_image(images, name, where, counts)
        size = (record.width, record.height) if record else _read_size(regions, file, where, counts, size_of)
        objects = [
            _read_region(region, size, ids, f"{where}, region {k + 1}", counts) for k, region in enumerate(regions)
        ]
        shapes = tuple(item for item in objects if item is not None)
        yield SourceImage(file, *size, shapes) if record is None else _with_keys_of(record, file, shapes)


def _with_keys_of(record: Record, file: Path, objects: tuple[SourceObject, ...]) -> SourceImage:
    request = {key: getattr(record, key) for key in ("classes", "expression", "prompt", "meta")}
    size = (record.width, record.height)
    return SourceImage(file, *size, objects, record.image_id, record.exhaustive, request)


def _load_tasks(path: Path) -> list[JsonObject]:
    kinds = (OSError, ValueError, RecursionError)
    with explain(kinds, f"{path}: not a JSON document", _FIX):
        tasks = json.loads(read_file(path))
    if not isinstance(tasks, list) or not tasks:
        raise DataError(f"{path}: not a list of tasks", _FIX)
    for number, task in enumerate(tasks, start=1):
        if not isinstance(task, dict) or not isinstance(task.get("data"), dict):
            raise DataError(f"{path}: task no {number} has no data", _FIX)
        annotations = task.get("annotations")
        if not isinstance(annotations, list) or not all(_is_annotation(entry) for entry in annotations):
            raise DataError(f"{path}: task no {number} has no list of annotations with their results", _FIX)
    return tasks


def _is_annotation(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("result"), list)


def _collect_category_ids(tasks: list[JsonObject]) -> dict[str, int]:
    """Return the category ids that exported tasks carry, by class. Labels that a person adds have theirs too."""
    ids: dict[str, int] = {}
    for task in tasks:
        listed = task["data"].get("category_ids")
        for desc, value in listed.items() if isinstance(listed, dict) else ():
            if type(value) is int and 0 <= value < LARGEST_ID:
                ids.setdefault(desc, value)
    return ids


def _choose_annotation(task: JsonObject, where: str, counts: ImportCounts) -> JsonObject | None:
    """Return the latest annotation, or None if nobody has annotated the task."""
    annotations = [entry for entry in task["annotations"] if not entry.get("was_cancelled")]
    if not annotations:
        counts.add("dropped", "task without an annotation", where)
        return None
    if len(annotations) > 1:
        counts.add("noted", "task with several annotations: the latest is taken", where)
    _, latest = max(enumerate(annotations), key=lambda entry: (_time(entry[1]), entry[0]))
    assert isinstance(latest, dict)
    return latest


def _time(annotation: JsonObject) -> str:
    """Return the time of the last change. Label Studio writes times in UTC in one format, so they sort as text."""
    return str(annotation.get("updated_at") or annotation.get("created_at") or "")


def _read_record(data: JsonObject, where: str) -> Record | None:
    """Return the record that a task was exported from, without its objects, or None if it was not."""
    if "coordexp" not in data:
        return None
    head = data["coordexp"] if isinstance(data["coordexp"], dict) else {}
    with explain(
        ValueError, f"{where}: data.coordexp", "leave it as `coordexp data export` wrote it, or remove it"
    ):
        return parse_record(json.dumps(head | {"space": "pixel", "objects": []}))


def _file_name(data: JsonObject, key: str, where: str) -> str:
    address = data.get(key)
    if not isinstance(address, str):
        raise DataError(
            f"{where}: its data has no {key!r}, but {', '.join(map(repr, data)) or 'nothing'}",
            "name the key of the image with --key",
        )
    parts = urlsplit(address)
    local = parse_qs(parts.query).get("d")
    return local[0] if local else _UPLOADED.sub("", unquote(parts.path).rsplit("/", 1)[-1])


def _read_size(
    regions: list[Any], file: Path, where: str, counts: ImportCounts, size_of: SizeOf
) -> tuple[int, int]:
    """Return the size that a region states, or else that of the file."""
    stated = [(r.get("original_width"), r.get("original_height")) for r in regions if isinstance(r, dict)]
    for width, height in stated:
        if type(width) is int and type(height) is int and width > 0 and height > 0:
            return width, height
    return read_missing_size(file, f"{where}: no region states the size of the image", where, counts, size_of)


def _read_region(
    region: Any, size: tuple[int, int], ids: dict[str, int], where: str, counts: ImportCounts
) -> SourceObject | None:
    if not isinstance(region, dict) or not isinstance(region.get("value"), dict):
        counts.add("dropped", "region without a value", where)
        return None
    kind, value = region.get("type"), region["value"]
    if kind not in SHAPES:
        counts.add("dropped", f"region of the type {kind}: not rectanglelabels or polygonlabels", where)
        return None
    if region.get("image_rotation"):
        counts.add("dropped", "region of an image that was rotated in Label Studio", where)
        return None
    names = value.get(kind)
    if not isinstance(names, list) or not names:
        counts.add("dropped", "region without a label", where)
        return None
    if len(names) > 1:
        counts.add("changed", "region with several labels: the first is taken", where)
    desc = check_name(names[0], where)
    if kind == "polygonlabels":
        return _read_polygon(desc, value, size, ids, where, counts)
    return _read_rectangle(desc, value, size, ids, where, counts)


def _read_polygon(
    desc: str, value: JsonObject, size: tuple[int, int], ids: dict[str, int], where: str, counts: ImportCounts
) -> SourceObject | None:
    points = value.get("points")
    pairs = [read_numbers(point) for point in points] if isinstance(points, list) else [None]
    if not all(pair is not None and len(pair) == 2 for pair in pairs):
        counts.add("dropped", "polygon whose points cannot be read", where)
        return None
    ring = tuple(number * size[axis] / 100 for pair in pairs if pair for axis, number in enumerate(pair))
    return SourceObject(desc, where, None, (ring,), ids.get(desc))


def _read_rectangle(
    desc: str, value: JsonObject, size: tuple[int, int], ids: dict[str, int], where: str, counts: ImportCounts
) -> SourceObject | None:
    numbers = read_numbers([value.get(name) for name in ("x", "y", "width", "height")])
    rotation = read_numbers([value.get("rotation") or 0])
    if numbers is None or rotation is None:
        counts.add("dropped", "rectangle whose numbers cannot be read", where)
        return None
    x, y, width, height = (number * size[k % 2] / 100 for k, number in enumerate(numbers))
    if abs(rotation[0]) < ROTATED:
        return SourceObject(desc, where, (x, y, x + width, y + height), (), ids.get(desc))
    counts.add("changed", "rotated rectangle: kept as a polygon", where)
    return SourceObject(desc, where, None, (_rotate(x, y, width, height, rotation[0]),), ids.get(desc))


def _rotate(x: float, y: float, width: float, height: float, degrees: float) -> Ring:
    """Return the corners of a rectangle that is rotated clockwise around its top left corner."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    corners = ((0.0, 0.0), (width, 0.0), (width, height), (0.0, height))
    return tuple(value for a, b in corners for value in (x + a * cos - b * sin, y + a * sin + b * cos))
