"""Label Studio: read its JSON export, and write records and suggested labels as tasks.

    {"data": {"image": "/data/local-files/?d=images/7.png",
              "coordexp": {"image": "images/7.png", "width": 640, "height": 480, "image_id": 7},
              "category_ids": {"cup": 3}},
     "annotations": [{"result": [REGION, ...]}],
     "predictions": [{"model_version": "coordexp", "score": 0.93, "result": [REGION, ...]}]}

A region is a rectangle or a polygon in percent of the image. The annotation has the labels of the record. A record
with suggestions also has a prediction with its labels and the suggestions, each of these with its score: a person
copies it to an annotation and removes what is wrong. `coordexp` has all keys of the record but its objects and
their space, so reading brings back the same record, in pixels.

Of the annotations of a task that were not cancelled, the latest counts. A rectangle becomes a box, a rotated one a
polygon of four vertices. Regions of other types and regions without a label are dropped and counted.

Tasks that were not written here have the address of an image. Its file is the path after `?d=` (local storage), or
else the last part of the address, without the eight characters that Label Studio puts before the name of an
uploaded file.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import quoteattr

from coordexp.data.addresses import is_file
from coordexp.data.importers.source import (
    Dropped,
    ImportCounts,
    SourceImage,
    SourceObject,
    check_name,
    read_json,
    read_numbers,
    read_points,
    read_size,
    resolve_image,
)
from coordexp.data.records import LARGEST_ID, Record, RecordObject, parse_record
from coordexp.errors import DataError, explain
from coordexp.files import write_whole

JsonObject = dict[str, Any]
Suggested = tuple[int, RecordObject, float]  # a label that is suggested for a record: its id, itself and its score
TOOLS = {"bbox_2d": ("box", "rectanglelabels"), "poly": ("polygon", "polygonlabels")}  # name and type of a region
ROTATED = 1e-6  # degrees from which a rectangle counts as rotated
_UPLOADED = re.compile(r"^[0-9a-f]{8}-(?=.)")
_FIX = "export the project as JSON (not JSON-MIN), and give that file"


def read_labelstudio(path: Path, images: Path, key: str, counts: ImportCounts) -> Iterator[SourceImage]:
    """Yield the images in the order of the tasks. `key` is the name of the image in the data of a task."""
    tasks = _load_tasks(path)
    ids = _collect_category_ids(tasks)
    for number, task in enumerate(tasks, start=1):
        where = f"task {task.get('id', f'no {number}')}"
        with counts.dropping(where):
            regions, record = _choose_regions(task, where, counts), _read_record(task["data"], where)
            name = record.image if record else _file_name(task["data"], key, where)
            file = resolve_image(images, name, where, counts)
            stated = [region if isinstance(region, dict) else {} for region in regions]
            sizes = [(region.get("original_width"), region.get("original_height")) for region in stated]
            if record:
                sizes.insert(0, (record.width, record.height))
            size = read_size(sizes, file, f"{where}: no region states the size of the image", where, counts)
            objects = []
            for k, region in enumerate(regions, start=1):
                with counts.dropping(f"{where}, region {k}"):
                    objects.append(_read_region(region, size, ids, f"{where}, region {k}", counts))
            keys = ("classes", "expression", "prompt", "meta")
            request = {key: getattr(record, key) for key in keys} if record else {}
            head = (record.image_id, record.exhaustive) if record else (None, None)
            yield SourceImage(file, *size, tuple(objects), *head, request)


def _load_tasks(path: Path) -> list[JsonObject]:
    tasks = read_json(path, _FIX)
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


def _choose_regions(task: JsonObject, where: str, counts: ImportCounts) -> list[Any]:
    """Return the regions of the latest annotation. Raise `Dropped` if nobody has annotated the task."""
    annotations = [entry for entry in task["annotations"] if not entry.get("was_cancelled")]
    if not annotations:
        raise Dropped("task without an annotation")
    if len(annotations) > 1:
        counts.add("noted", "task with several annotations: the latest is taken", where)
    # Label Studio writes times in UTC in one format, so they sort as text. Of equal ones, the last counts.
    times = [str(entry.get("updated_at") or entry.get("created_at") or "") for entry in annotations]
    regions: list[Any] = annotations[max(range(len(times)), key=lambda k: (times[k], k))]["result"]
    return regions


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


def _read_region(
    region: Any, size: tuple[int, int], ids: Mapping[str, int], where: str, counts: ImportCounts
) -> SourceObject:
    if not isinstance(region, dict) or not isinstance(region.get("value"), dict):
        raise Dropped("region without a value")
    kind, value = region.get("type"), region["value"]
    if kind not in ("rectanglelabels", "polygonlabels"):
        raise Dropped(f"region of the type {kind}: not rectanglelabels or polygonlabels")
    if region.get("image_rotation"):
        raise Dropped("region of an image that was rotated in Label Studio")
    names = value.get(kind)
    if not isinstance(names, list) or not names:
        raise Dropped("region without a label")
    if len(names) > 1:
        counts.add("changed", "region with several labels: the first is taken", where)
    desc = check_name(names[0], where)
    if kind == "polygonlabels":
        points = read_points(value.get("points"))
        if points is None:
            raise Dropped("polygon whose points cannot be read")
        ring = tuple(number * size[k % 2] / 100 for k, number in enumerate(points))
        return SourceObject(desc, where, None, (ring,), ids.get(desc))
    numbers = read_numbers([value.get(name) for name in ("x", "y", "width", "height")])
    rotation = read_numbers([value.get("rotation") or 0])
    if numbers is None or rotation is None:
        raise Dropped("rectangle whose numbers cannot be read")
    x, y, width, height = (number * size[k % 2] / 100 for k, number in enumerate(numbers))
    if abs(rotation[0]) < ROTATED:
        return SourceObject(desc, where, (x, y, x + width, y + height), (), ids.get(desc))
    counts.add("changed", "rotated rectangle: kept as a polygon", where)
    cos, sin = math.cos(math.radians(rotation[0])), math.sin(math.radians(rotation[0]))  # clockwise around x, y
    corners = ((0.0, 0.0), (width, 0.0), (width, height), (0.0, height))
    ring = tuple(value for a, b in corners for value in (x + a * cos - b * sin, y + a * sin + b * cos))
    return SourceObject(desc, where, None, (ring,), ids.get(desc))


def write_tasks(
    target: Path,
    records: Iterable[tuple[Record, Sequence[Suggested]]],
    prefix: str = "/data/local-files/?d=",
    model_version: str = "coordexp",
    only_suggested: bool = False,
) -> tuple[int, int]:
    """Write a task for each record, or only for those with suggestions, whole or not at all, and beside them the
    labelling config. Return the number of tasks and that of classes. The address of an image is its path after the
    prefix, which is by default that of Label Studio's local storage."""
    tasks, classes = 0, set[str]()

    def format_tasks() -> Iterator[str]:
        nonlocal tasks
        for record, suggestions in records:
            if suggestions or not only_suggested:
                classes.update(item.desc for item in (*record.objects, *(item for _, item, _ in suggestions)))
                task = to_task(record, suggestions, prefix, model_version)
                yield ("[\n" if not tasks else ",\n") + json.dumps(task)
                tasks += 1
        yield "\n]\n" if tasks else "[]\n"

    write_whole(target, format_tasks())
    write_whole(target.with_suffix(".xml"), labelling_config(sorted(classes)))
    return tasks, len(classes)


def to_task(record: Record, suggestions: Sequence[Suggested], prefix: str, model_version: str) -> JsonObject:
    """Return the task of a record with the labels that are suggested for it. Raise DataError if its image is no
    file, which a browser could not show."""
    if not is_file(record.image):
        raise DataError(
            f"{record.image} is not a file of its own, which Label Studio could show", "write the images to files"
        )
    numbered = [*record.objects, *(item for _, item, _ in suggestions)]
    category_ids = {item.desc: item.category_id for item in numbered if item.category_id is not None}
    head = json.loads(replace(record, objects=()).as_json())
    data = {
        "image": prefix + quote(record.image),
        "coordexp": {key: value for key, value in head.items() if key not in ("objects", "space")},
        **({"category_ids": category_ids} if category_ids else {}),
    }
    labels = [_to_region(item, record, f"label-{k}") for k, item in enumerate(record.objects, start=1)]
    task: JsonObject = {"data": data, "annotations": [{"result": labels}]}
    if suggestions:
        regions = [
            _to_region(item, record, f"suggestion-{id}") | {"score": score} for id, item, score in suggestions
        ]
        best = max(score for _, _, score in suggestions)
        task["predictions"] = [{"model_version": model_version, "score": best, "result": [*labels, *regions]}]
    return task


def _to_region(item: RecordObject, record: Record, id: str) -> JsonObject:
    name, kind = TOOLS[item.kind]
    extent = record.extent
    percents = [100 * value / extent[k % 2] for k, value in enumerate(item.coords)]
    value: JsonObject
    if item.kind == "poly":
        points = zip(percents[::2], percents[1::2], strict=True)
        value = {"points": [list(pair) for pair in points], "closed": True}
    else:
        x1, y1, x2, y2 = percents
        value = {"x": x1, "y": y1, "width": x2 - x1, "height": y2 - y1, "rotation": 0}
    return {
        "id": id,
        "type": kind,
        "from_name": name,
        "to_name": "image",
        "original_width": record.width,
        "original_height": record.height,
        "image_rotation": 0,
        "value": value | {kind: [item.desc]},
    }


def labelling_config(classes: Iterable[str]) -> str:
    """Return the XML with which Label Studio shows the tasks: rectangles and polygons of these classes."""
    labels = "".join(f"    <Label value={quoteattr(desc)}/>\n" for desc in classes)
    return (
        '<View>\n  <Image name="image" value="$image" zoom="true"/>\n'
        f'  <RectangleLabels name="box" toName="image">\n{labels}  </RectangleLabels>\n'
        f'  <PolygonLabels name="polygon" toName="image">\n{labels}  </PolygonLabels>\n</View>\n'
    )
