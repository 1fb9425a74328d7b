"""Read labelme: a JSON file beside each image, with rectangles, polygons and circles.

A circle becomes a polygon of 32 vertices. Shapes of one label with the same `group_id` are the parts of one
object, as in labelme's own export to COCO. Points, lines and masks are dropped and counted, since records cannot
hold them.
"""

import json
import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path, PureWindowsPath
from typing import Any

from coordexp.data.geometry import box_ring
from coordexp.data.importers.source import (
    Dropped,
    ImportCounts,
    Ring,
    SourceImage,
    SourceObject,
    bounding_box,
    check_name,
    read_points,
    read_size,
    resolve_image,
)
from coordexp.errors import DataError
from coordexp.files import read_file

CIRCLE_VERTICES = 32


def read_labelme(folder: Path, images: Path | None, counts: ImportCounts) -> Iterator[SourceImage]:
    files = sorted(folder.rglob("*.json"))
    if not files:
        raise DataError(f"{folder}: no .json files", "give the folder that labelme wrote to")
    for file in files:
        with counts.dropping(str(file)):
            document = _load_document(file)
            # labelme writes paths relative to its own file, in the style of the system it ran on.
            name = document["imagePath"] if images is None else PureWindowsPath(document["imagePath"]).name
            path = resolve_image(images or file.parent, name, str(file), counts)
            stated = [(document.get("imageWidth"), document.get("imageHeight"))]
            size = read_size(stated, path, f"{file}: no imageWidth and imageHeight", str(file), counts)
            yield SourceImage(path, *size, tuple(_read_objects(document["shapes"], file, counts)))


def _load_document(file: Path) -> dict[str, Any]:
    """Return the document. Raise `Dropped` if the file is not one of labelme's."""
    try:
        document = json.loads(read_file(file))
    except (ValueError, RecursionError):
        document = None
    kinds = {"shapes": list, "imagePath": str}
    if not isinstance(document, dict) or not all(isinstance(document.get(key), kinds[key]) for key in kinds):
        raise Dropped("file that is not one of labelme's")
    return document


def _read_objects(shapes: list[Any], file: Path, counts: ImportCounts) -> Iterator[SourceObject]:
    """Yield the objects in the order of their first parts."""
    groups: dict[Any, list[SourceObject]] = {}
    for index, shape in enumerate(shapes):
        where = f"{file} shapes[{index}]"
        with counts.dropping(where):
            part = _read_shape(shape, where)
            group = shape.get("group_id")
            groups.setdefault(index if group is None else (part.desc, str(group)), []).append(part)
    for first, *others in groups.values():
        if others:
            parts = (part.rings if part.box is None else (box_ring(part.box),) for part in (first, *others))
            yield SourceObject(first.desc, first.where, None, tuple(chain.from_iterable(parts)))
        else:
            yield first


def _read_shape(shape: Any, where: str) -> SourceObject:
    if not isinstance(shape, dict):
        raise Dropped("shape that is not a JSON object")
    kind = shape.get("shape_type", "polygon")
    if kind not in ("rectangle", "polygon", "circle"):
        raise Dropped(f"shape of the type {kind}: not a rectangle, polygon or circle")
    points = read_points(shape.get("points"))
    if points is None or (kind == "circle" and len(points) != 4) or len(points) < 4:
        raise Dropped(f"{kind} whose points cannot be read")
    desc = check_name(shape.get("label"), where)
    if kind == "rectangle":
        return SourceObject(desc, where, bounding_box([points]))
    return SourceObject(desc, where, None, (points if kind == "polygon" else _circle_ring(points),))


def _circle_ring(points: Ring) -> Ring:
    """Return a circle as a polygon, from its centre and a point on it."""
    x, y, *edge = points
    radius = math.dist((x, y), edge)
    angles = [2 * math.pi * k / CIRCLE_VERTICES for k in range(CIRCLE_VERTICES)]
    return tuple(v for a in angles for v in (x + radius * math.cos(a), y + radius * math.sin(a)))
