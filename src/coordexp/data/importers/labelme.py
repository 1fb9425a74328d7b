"""Read labelme: a JSON file beside each image, with rectangles, polygons and circles.

A circle becomes a polygon of 32 vertices. Shapes of one label with the same `group_id` are the parts of one
object, as in labelme's own export to COCO. Points, lines and masks are dropped and counted, since records cannot
hold them.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

from coordexp.data.importers.source import (
    ImportCounts,
    Ring,
    SizeOf,
    SourceImage,
    SourceObject,
    bounding_box,
    check_name,
    read_missing_size,
    read_numbers,
    resolve_image,
)
from coordexp.errors import DataError
from coordexp.files import read_file

CIRCLE_VERTICES = 32


def read_labelme(
    folder: Path, images: Path | None, counts: ImportCounts, size_of: SizeOf
) -> Iterator[SourceImage]:
    files = sorted(folder.rglob("*.json"))
    if not files:
        raise DataError(f"{folder}: no .json files", "give the folder that labelme wrote to")
    for file in files:
        document = _load_document(file)
        if document is None:
            counts.add("dropped", "file that is not one of labelme's", str(file))
            continue
        path = _image_path(file, document["imagePath"], images, counts)
        width, height = _read_size(document, file, path, counts, size_of)
        yield SourceImage(path, width, height, tuple(_read_objects(document["shapes"], file, counts)))


def _load_document(file: Path) -> dict[str, Any] | None:
    """Return the document, or None if the file is not one of labelme's."""
    try:
        document = json.loads(read_file(file))
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not isinstance(document.get("shapes"), list):
        return None
    return document if isinstance(document.get("imagePath"), str) else None


def _image_path(file: Path, name: str, images: Path | None, counts: ImportCounts) -> Path:
    """Return the path of the image. labelme writes it relative to its own file, in the style of the system it ran
    on; with --images only the file name counts."""
    if images is not None:
        return resolve_image(images, PureWindowsPath(name).name, str(file), counts)
    return resolve_image(file.parent, name, str(file), counts)


def _read_size(
    document: dict[str, Any], file: Path, path: Path, counts: ImportCounts, size_of: SizeOf
) -> tuple[int, int]:
    width, height = document.get("imageWidth"), document.get("imageHeight")
    if type(width) is int and type(height) is int and width > 0 and height > 0:
        return width, height
    return read_missing_size(path, f"{file}: no imageWidth and imageHeight", str(file), counts, size_of)


def _read_objects(shapes: list[Any], file: Path, counts: ImportCounts) -> Iterator[SourceObject]:
    """Yield the objects in the order of their first parts."""
    groups: dict[Any, list[SourceObject]] = {}
    for index, shape in enumerate(shapes):
        part = _read_shape(shape, f"{file} shapes[{index}]", counts)
        if part is not None:
            group = shape.get("group_id")
            key = index if group is None else (part.desc, str(group))
            groups.setdefault(key, []).append(part)
    for parts in groups.values():
        yield parts[0] if len(parts) == 1 else _join(parts)


def _join(parts: list[SourceObject]) -> SourceObject:
    rings = [ring for part in parts for ring in (part.rings or _corners(part))]
    return SourceObject(parts[0].desc, parts[0].where, None, tuple(rings))


def _corners(part: SourceObject) -> tuple[Ring, ...]:
    assert part.box is not None
    x1, y1, x2, y2 = part.box
    return ((x1, y1, x2, y1, x2, y2, x1, y2),)


def _read_shape(shape: Any, where: str, counts: ImportCounts) -> SourceObject | None:
    if not isinstance(shape, dict):
        counts.add("dropped", "shape that is not a JSON object", where)
        return None
    kind = shape.get("shape_type", "polygon")
    if kind not in ("rectangle", "polygon", "circle"):
        counts.add("dropped", f"shape of the type {kind}: not a rectangle, polygon or circle", where)
        return None
    points = _read_points(shape.get("points"))
    if points is None or (kind == "circle" and len(points) != 4) or len(points) < 4:
        counts.add("dropped", f"{kind} whose points cannot be read", where)
        return None
    desc = check_name(shape.get("label"), where)
    if kind == "rectangle":
        return SourceObject(desc, where, bounding_box([points]))
    return SourceObject(desc, where, None, (points if kind == "polygon" else _circle_ring(points),))


def _read_points(value: Any) -> Ring | None:
    pairs = [read_numbers(point) for point in value] if isinstance(value, list) else [None]
    if not all(pair is not None and len(pair) == 2 for pair in pairs):
        return None
    return tuple(number for pair in pairs if pair is not None for number in pair)


def _circle_ring(points: Ring) -> Ring:
    """Return a circle as a polygon, from its centre and a point on it."""
    x, y, *edge = points
    radius = math.dist((x, y), edge)
    angles = [2 * math.pi * k / CIRCLE_VERTICES for k in range(CIRCLE_VERTICES)]
    return tuple(v for a in angles for v in (x + radius * math.cos(a), y + radius * math.sin(a)))
