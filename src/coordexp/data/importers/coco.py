"""Read COCO and LVIS instances: one JSON document with images, categories and annotations, in any order and with
any ids.

An annotation without an image or a category is dropped and counted. Whatever would need a guess stops the import:
two different images with one id, a size that nobody states, a file name that leads out of the folder. The ids of
images and categories are kept in the records.

LVIS gives the address of each image instead of a file name:
`http://images.cocodataset.org/val2017/000000397133.jpg` is the file `val2017/000000397133.jpg` in the folder of
images. LVIS labels every object only of the categories that it lists for an image, as present or absent. These
become the `exhaustive` classes of the record.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from coordexp.data.importers.source import (
    Box,
    ImportCounts,
    Ring,
    Rules,
    SizeOf,
    SourceImage,
    SourceObject,
    check_name,
    read_missing_size,
    read_numbers,
    resolve_image,
    ring_area,
)
from coordexp.data.records import LARGEST_ID
from coordexp.errors import DataError, explain
from coordexp.files import read_file

JsonObject = dict[str, Any]
NOT_EXHAUSTIVE = (
    "image in which not all objects of a category are marked: correct detections can count as false there"
)


def read_coco(
    path: Path, images: Path, rules: Rules, counts: ImportCounts, size_of: SizeOf
) -> Iterator[SourceImage]:
    yield from _read_document(_load_document(path), images, rules, counts, size_of)


def read_lvis(
    path: Path, images: Path, rules: Rules, counts: ImportCounts, size_of: SizeOf
) -> Iterator[SourceImage]:
    document = _load_document(path)
    for image in document["images"]:
        if image.get("not_exhaustive_category_ids"):
            counts.add("noted", NOT_EXHAUSTIVE, f"image {image.get('id')!r}")
        image["file_name"] = _lvis_file_name(image)
    yield from _read_document(document, images, rules, counts, size_of, is_lvis=True)


def _lvis_file_name(image: JsonObject) -> Any:
    """Return the file name, or else the last two parts of the address: the split and the file."""
    url = image.get("coco_url")
    if image.get("file_name") or not isinstance(url, str):
        return image.get("file_name")
    return "/".join(unquote(urlsplit(url).path).split("/")[-2:])


def _load_document(path: Path) -> JsonObject:
    kinds = (OSError, ValueError, RecursionError)
    with explain(kinds, f"{path}: not a JSON document", "give the file of annotations"):
        document = json.loads(read_file(path))
    for name in ("images", "categories", "annotations"):
        entries = document.get(name) if isinstance(document, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise DataError(
                f"{path}: no list of {name}",
                "give a COCO file of instances, with images, categories and annotations (not results or captions)",
            )
    assert isinstance(document, dict)
    return document


def _read_document(
    document: JsonObject,
    folder: Path,
    rules: Rules,
    counts: ImportCounts,
    size_of: SizeOf,
    is_lvis: bool = False,
) -> Iterator[SourceImage]:
    """Yield the images in the order of the document, each with its annotations in their order."""
    names = _read_categories(document["categories"], counts)
    images = _index_by_id(document["images"], "image", counts)
    annotations = _group_by_image(document["annotations"], images, names, rules, counts)
    seen: set[Path] = set()
    for id, image in images.items():
        where = f"image {id!r}"
        path = resolve_image(folder, image.get("file_name"), where, counts)
        if path in seen:
            counts.add("noted", "file that two images share: both are kept", where)
        seen.add(path)
        size = _read_size(image, path, where, counts, size_of)
        own = annotations.pop(id, [])
        kept = [annotation for annotation in own if not _is_dropped_crowd(annotation, rules)]
        objects = [
            _read_object(annotation, names[annotation["category_id"]], size, rules, counts) for annotation in kept
        ]
        unlabelled = {annotation["category_id"] for annotation in own if _is_dropped_crowd(annotation, rules)}
        exhaustive = _find_exhaustive(image, own, names, unlabelled, is_lvis)
        yield SourceImage(path, *size, tuple(objects), _keep_id(id, "image", counts), exhaustive)


def _is_dropped_crowd(annotation: JsonObject, rules: Rules) -> bool:
    return bool(annotation.get("iscrowd")) and rules.crowd == "drop"


def _find_exhaustive(
    image: JsonObject, own: Sequence[JsonObject], names: Mapping[Any, str], unlabelled: set[Any], is_lvis: bool
) -> tuple[str, ...] | None:
    """Return the names of the categories of which all objects are labelled, or None if these are all categories. A
    crowd that is dropped leaves objects of its category without a label."""
    known: Iterable[Any] = names
    if is_lvis:
        known = [*(annotation["category_id"] for annotation in own), *_read_ids(image, "neg_category_ids")]
        unlabelled = unlabelled | set(_read_ids(image, "not_exhaustive_category_ids"))
    elif not unlabelled:
        return None
    lacking = {names[id] for id in unlabelled if id in names}
    return tuple(dict.fromkeys(names[id] for id in known if id in names and names[id] not in lacking))


def _read_ids(image: JsonObject, key: str) -> list[Any]:
    ids = image.get(key) or []
    if not isinstance(ids, list) or not all(type(id) in (int, str) for id in ids):
        raise DataError(f"image {image.get('id')!r}: {key} is not a list of ids", "correct or remove it")
    return ids


def _read_categories(entries: list[JsonObject], counts: ImportCounts) -> dict[Any, str]:
    categories = _index_by_id(entries, "category", counts)
    names = {id: check_name(category.get("name"), f"category {id!r}") for id, category in categories.items()}
    ids: dict[str, Any] = {}
    for id, name in names.items():
        if ids.setdefault(name, id) != id:
            counts.add("noted", "category with the name of another: they become one", f"category {id!r} {name!r}")
    return names


def _index_by_id(entries: list[JsonObject], what: str, counts: ImportCounts) -> dict[Any, JsonObject]:
    by_id: dict[Any, JsonObject] = {}
    for entry in entries:
        id = entry.get("id")
        if type(id) not in (int, str):
            raise DataError(f"{what} {entry}: the id {id!r} is not a number or a text", f"give each {what} an id")
        if id not in by_id:
            by_id[id] = entry
        elif by_id[id] == entry:
            counts.add("dropped", f"{what} that occurs twice", f"{what} {id!r}")
        else:
            raise DataError(
                f"{what} id {id!r} is used twice, by {by_id[id]} and {entry}",
                "give each its own id; its annotations could belong to either",
            )
    return by_id


def _group_by_image(
    annotations: list[JsonObject],
    images: dict[Any, JsonObject],
    names: dict[Any, str],
    rules: Rules,
    counts: ImportCounts,
) -> dict[Any, list[JsonObject]]:
    groups: dict[Any, list[JsonObject]] = {}
    by_id: dict[Any, JsonObject] = {}
    for index, annotation in enumerate(annotations):
        id = annotation.get("id", f"no {index}")
        where = _describe(annotation)
        image, category = annotation.get("image_id"), annotation.get("category_id")
        if type(image) not in (int, str) or image not in images:
            counts.add("dropped", "annotation of an unknown image", f"{where} (image {image!r})")
        elif type(category) not in (int, str) or category not in names:
            counts.add("dropped", "annotation of an unknown category", f"{where} (category {category!r})")
        elif (
            type(id) in (int, str)
            and by_id.setdefault(id, annotation) is not annotation
            and by_id[id] == annotation
        ):
            counts.add("dropped", "annotation that occurs twice", where)
        else:
            if type(id) in (int, str) and by_id[id] is not annotation:
                counts.add("noted", "annotation with the id of another: both are kept", where)
            if _is_dropped_crowd(annotation, rules):
                counts.add("dropped", "crowd (--crowd drop)", where)
            elif annotation.get("iscrowd"):
                counts.add("noted", "crowd: kept as one object", where)
            groups.setdefault(image, []).append(annotation)
    return groups


def _read_size(
    image: JsonObject, path: Path, where: str, counts: ImportCounts, size_of: SizeOf
) -> tuple[int, int]:
    width, height = image.get("width"), image.get("height")
    if width is None or height is None:
        return read_missing_size(path, f"{where}: no width and height", where, counts, size_of)
    if not all(type(side) in (int, float) and side > 0 and side % 1 == 0 for side in (width, height)):
        raise DataError(
            f"{where}: width {width!r} and height {height!r} are not positive whole numbers",
            "correct or remove them",
        )
    return int(width), int(height)


def _read_object(
    annotation: JsonObject, desc: str, size: tuple[int, int], rules: Rules, counts: ImportCounts
) -> SourceObject:
    where = _describe(annotation)
    box = _read_box(annotation.get("bbox"), where, counts)
    needs_rings = rules.geometry != "box" or box is None
    rings = _read_rings(annotation.get("segmentation"), size, where, counts) if needs_rings else ()
    return SourceObject(desc, where, box, rings, _keep_id(annotation["category_id"], "category", counts))


def _keep_id(id: int | str, what: str, counts: ImportCounts) -> int | None:
    """Return the id for the record, from which predictions take it, or None: COCO's tools know only whole
    numbers."""
    if isinstance(id, int) and 0 <= id < LARGEST_ID:
        return id
    counts.add("noted", f"{what} id that is not a whole number from 0: it is not kept", f"{what} {id!r}")
    return None


def _describe(annotation: JsonObject) -> str:
    return f"annotation {annotation.get('id')!r} of image {annotation.get('image_id')!r}"


def _read_box(value: Any, where: str, counts: ImportCounts) -> Box | None:
    if value is None:
        return None
    coords = read_numbers(value)
    if coords is None or len(coords) != 4:
        counts.add("changed", "bbox that is not four numbers: it is ignored", where)
        return None
    x, y, width, height = coords
    return x, y, x + width, y + height


def _read_rings(value: Any, size: tuple[int, int], where: str, counts: ImportCounts) -> tuple[Ring, ...]:
    if value is None or value == []:
        return ()
    if isinstance(value, dict):
        return _read_mask(value, size, where, counts)
    flat = read_numbers(value)  # a single ring without the list around it
    if flat is not None:
        return (flat,)
    rings = [read_numbers(ring) for ring in value] if isinstance(value, list) else [None]
    if None in rings:
        counts.add("dropped", "ring that is not a list of numbers", where)
    return tuple(ring for ring in rings if ring is not None)


def _read_mask(value: JsonObject, size: tuple[int, int], where: str, counts: ImportCounts) -> tuple[Ring, ...]:
    try:
        mask = decode_mask(value, *size)
    except ValueError as error:
        counts.add("dropped", f"mask: {error}", where)
        return ()
    rings, holes = trace_outlines(mask)
    if not rings:
        counts.add("dropped", "mask without a pixel", where)
    if holes:
        counts.add("changed", "mask with a hole: the hole is filled", where)
    return tuple(rings)


# Run-length masks, compressed or not, and the outlines of their parts

_STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # right, down, left, up: the inside is to the right of each step


def decode_mask(segmentation: dict[str, Any], width: int, height: int) -> NDArray[np.bool_]:
    """Return the mask, rows by columns. Raise ValueError if it is broken: no broken mask reaches C code."""
    if segmentation.get("size") != [height, width]:
        raise ValueError("the size of a mask differs from that of its image")
    counts = segmentation.get("counts")
    runs = _decompress(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or not all(type(run) is int and run >= 0 for run in runs):
        raise ValueError("the runs of a mask are not whole numbers from 0")
    if sum(runs) != width * height:
        raise ValueError("the runs of a mask do not add up to the size of its image")
    columns = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return columns.reshape(width, height).T


def _decompress(text: str) -> list[int]:
    """Return the runs of COCO's own format: numbers in characters of six bits, the lowest bits first. From the
    fourth run on, they are differences from the run before the last."""
    runs: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError("the compressed runs of a mask cannot be read")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("the compressed runs of a mask end in the middle of a number")
    return runs


def trace_outlines(mask: NDArray[np.bool_]) -> tuple[list[Ring], int]:
    """Return the outer rings of the parts, from the top, and the number of holes that they fill.

    An outline runs along the edges of pixels, so it encloses exactly the pixels of its part. Pixels that touch at
    a corner belong to one part. A single ring cannot have a hole: the pixels of holes become part of the shape."""
    directions, starts = _find_edges(mask)
    used: set[tuple[int, int]] = set()
    rings, holes = [], 0
    for start in starts:
        if start in used:
            continue
        ring = _walk(start, directions, used)
        if ring_area(ring) > 0:
            rings.append(ring)
        else:
            holes += 1
    return rings, holes


def _find_edges(mask: NDArray[np.bool_]) -> tuple[dict[tuple[int, int], list[int]], list[tuple[int, int]]]:
    """Return the directions in which outlines leave each corner, and the corners where an upper edge begins."""
    padded = np.pad(mask, 1)
    inner = padded[1:-1, 1:-1]
    above, right, below, left = padded[:-2, 1:-1], padded[1:-1, 2:], padded[2:, 1:-1], padded[1:-1, :-2]
    begins = ((0, 0), (1, 0), (1, 1), (0, 1))  # the corner of a pixel from which its edge on that side starts
    directions: dict[tuple[int, int], list[int]] = {}
    for direction, (neighbour, (dx, dy)) in enumerate(zip((above, right, below, left), begins, strict=True)):
        ys, xs = np.nonzero(inner & ~neighbour)
        for corner in zip((xs + dx).tolist(), (ys + dy).tolist(), strict=True):
            directions.setdefault(corner, []).append(direction)
    return directions, [corner for corner, leaving in directions.items() if 0 in leaving]


def _walk(
    start: tuple[int, int], directions: dict[tuple[int, int], list[int]], used: set[tuple[int, int]]
) -> Ring:
    """Return one outline, followed once around from an upper edge. Where two outlines meet at a corner, turning
    left keeps them together."""
    ring: list[float] = []
    corner, direction, previous = start, 0, -1
    while corner != start or direction != 0 or previous < 0:
        if direction == 0:
            used.add(corner)
        if direction != previous:
            ring += corner
        corner = (corner[0] + _STEPS[direction][0], corner[1] + _STEPS[direction][1])
        previous = direction
        direction = directions[corner][0] if len(directions[corner]) == 1 else (direction - 1) % 4
    return tuple(map(float, ring))
