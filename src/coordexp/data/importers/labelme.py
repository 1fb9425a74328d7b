"""labelme: a JSON file beside each image, with rectangles, polygons and circles.

A circle becomes a polygon of 32 vertices. Shapes of one label with the same `group_id` are the parts of one
object, as in labelme's own export to COCO. Points, lines and masks have no place in a record and are counted.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

from coordexp.data.importers.source import (
    Ring,
    SizeOf,
    SourceError,
    SourceImage,
    SourceObject,
    hull,
    inside,
    numbers,
    text_of,
)
from coordexp.data.importers.tally import Tally

CIRCLE = 32


def read_labelme(folder: Path, images: Path | None, tally: Tally, size_of: SizeOf) -> Iterator[SourceImage]:
    files = sorted(folder.rglob("*.json"))
    if not files:
        raise SourceError(f"{folder}: no .json files\n  give the folder that labelme wrote to")
    for file in files:
        document = _document(file)
        if document is None:
            tally.add("dropped", "file that is not one of labelme's", str(file))
            continue
        path = _picture(file, document["imagePath"], images, tally)
        width, height = _size(document, file, path, tally, size_of)
        yield SourceImage(path, width, height, tuple(_objects(document["shapes"], file, tally)))


def _document(file: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not isinstance(document.get("shapes"), list):
        return None
    return document if isinstance(document.get("imagePath"), str) else None


def _picture(file: Path, name: str, images: Path | None, tally: Tally) -> Path:
    """labelme writes a path relative to its file, of the system it ran on; with --images only the name counts."""
    if images is not None:
        return inside(images, PureWindowsPath(name).name, str(file), tally)
    return inside(file.parent, name, str(file), tally)


def _size(document: dict[str, Any], file: Path, path: Path, tally: Tally, size_of: SizeOf) -> tuple[int, int]:
    width, height = document.get("imageWidth"), document.get("imageHeight")
    if type(width) is int and type(height) is int and width > 0 and height > 0:
        return width, height
    try:
        size = size_of(path)
    except OSError as error:
        raise SourceError(
            f"{file}: no imageWidth and imageHeight, and {path} cannot be read: {error}\n"
            "  give the folder of the images with --images"
        ) from error
    tally.add("changed", "image without width and height: read from its file", str(file))
    return size


def _objects(shapes: list[Any], file: Path, tally: Tally) -> Iterator[SourceObject]:
    """In the order of their first parts."""
    grouped: dict[Any, list[SourceObject]] = {}
    for index, shape in enumerate(shapes):
        found = _object(shape, f"{file} shapes[{index}]", tally)
        if found is not None:
            group = shape.get("group_id")
            key = index if group is None else (found.desc, str(group))
            grouped.setdefault(key, []).append(found)
    for parts in grouped.values():
        yield parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: list[SourceObject]) -> SourceObject:
    rings = [ring for part in parts for ring in (part.rings or _corners(part))]
    return SourceObject(parts[0].desc, parts[0].where, None, tuple(rings))


def _corners(part: SourceObject) -> tuple[Ring, ...]:
    assert part.box is not None
    x1, y1, x2, y2 = part.box
    return ((x1, y1, x2, y1, x2, y2, x1, y2),)


def _object(shape: Any, where: str, tally: Tally) -> SourceObject | None:
    if not isinstance(shape, dict):
        tally.add("dropped", "shape that is not a JSON object", where)
        return None
    kind = shape.get("shape_type", "polygon")
    if kind not in ("rectangle", "polygon", "circle"):
        tally.add("dropped", f"shape of the type {kind}: not a rectangle, polygon or circle", where)
        return None
    points = _points(shape.get("points"))
    if points is None or (kind == "circle" and len(points) != 4) or len(points) < 4:
        tally.add("dropped", f"{kind} whose points cannot be read", where)
        return None
    desc = text_of(shape.get("label"), where)
    if kind == "rectangle":
        return SourceObject(desc, where, hull([points]))
    return SourceObject(desc, where, None, (points if kind == "polygon" else _circle(points),))


def _points(value: Any) -> Ring | None:
    pairs = [numbers(point) for point in value] if isinstance(value, list) else [None]
    if not all(pair is not None and len(pair) == 2 for pair in pairs):
        return None
    return tuple(number for pair in pairs if pair is not None for number in pair)


def _circle(points: Ring) -> Ring:
    """From its centre and a point on it."""
    x, y, *edge = points
    radius = math.dist((x, y), edge)
    angles = [2 * math.pi * k / CIRCLE for k in range(CIRCLE)]
    return tuple(v for a in angles for v in (x + radius * math.cos(a), y + radius * math.sin(a)))
