"""COCO instances: one JSON document with images, categories and annotations, in any order and with any ids.

An annotation without an image or a category is dropped and counted. What would need a guess - two different
images with one id, a size that nobody states, a file name that leads elsewhere - stops the import. The ids of
images and categories are kept in the records.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from coordexp.data.importers.outline import decode, trace
from coordexp.data.importers.source import (
    Box,
    Ring,
    Rules,
    SizeOf,
    SourceError,
    SourceImage,
    SourceObject,
    inside,
    numbers,
    text_of,
)
from coordexp.data.importers.tally import Tally
from coordexp.data.records import LARGEST_ID

Entry = dict[str, Any]


def read_coco(path: Path, images: Path, rules: Rules, tally: Tally, size_of: SizeOf) -> Iterator[SourceImage]:
    document = load_document(path)
    yield from read_document(document, images, rules, tally, size_of, lambda entry: entry.get("file_name"))


def load_document(path: Path) -> Entry:
    try:
        with path.open("rb") as file:
            document = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not a JSON document: {error}\n  give the file of annotations") from error
    for name in ("images", "categories", "annotations"):
        found = document.get(name) if isinstance(document, dict) else None
        if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
            raise SourceError(
                f"{path}: no list of {name}\n"
                "  a COCO file of instances has images, categories and annotations (no results, no captions)"
            )
    assert isinstance(document, dict)
    return document


def read_document(
    document: Entry,
    folder: Path,
    rules: Rules,
    tally: Tally,
    size_of: SizeOf,
    name_of: Callable[[Entry], Any],
) -> Iterator[SourceImage]:
    """The images in their order, each with its annotations in theirs."""
    names = _categories(document["categories"], tally)
    images = _by_id(document["images"], "image", tally)
    grouped = _grouped(document["annotations"], images, names, rules, tally)
    seen: set[Path] = set()
    for id, entry in images.items():
        where = f"image {id!r}"
        path = inside(folder, name_of(entry), where, tally)
        if path in seen:
            tally.add("noted", "file that two images share: both are kept", where)
        seen.add(path)
        width, height = _size(entry, path, where, tally, size_of)
        objects = [
            _object(found, names[found["category_id"]], (width, height), rules, tally)
            for found in grouped.pop(id, ())
        ]
        yield SourceImage(path, width, height, tuple(objects), _kept(id, "image", tally))


def _categories(entries: list[Entry], tally: Tally) -> dict[Any, str]:
    named = _by_id(entries, "category", tally)
    names = {id: text_of(entry.get("name"), f"category {id!r}") for id, entry in named.items()}
    ids: dict[str, Any] = {}
    for id, name in names.items():
        if ids.setdefault(name, id) != id:
            tally.add("noted", "category with the name of another: they become one", f"category {id!r} {name!r}")
    return names


def _by_id(entries: list[Entry], what: str, tally: Tally) -> dict[Any, Entry]:
    found: dict[Any, Entry] = {}
    for entry in entries:
        id = entry.get("id")
        if type(id) not in (int, str):
            raise SourceError(f"{what} {entry}: the id {id!r} is not a number or a text\n  give each {what} an id")
        if id not in found:
            found[id] = entry
        elif found[id] == entry:
            tally.add("dropped", f"{what} that is there twice", f"{what} {id!r}")
        else:
            raise SourceError(
                f"{what} id {id!r} is taken twice, by {found[id]} and {entry}\n"
                "  its annotations could belong to either; give each its own id"
            )
    return found


def _grouped(
    annotations: list[Entry], images: dict[Any, Entry], names: dict[Any, str], rules: Rules, tally: Tally
) -> dict[Any, list[Entry]]:
    groups: dict[Any, list[Entry]] = {}
    known: dict[Any, Entry] = {}
    for index, found in enumerate(annotations):
        id = found.get("id", f"no {index}")
        where = _where(found)
        image, category = found.get("image_id"), found.get("category_id")
        if type(image) not in (int, str) or image not in images:
            tally.add("dropped", "annotation of an unknown image", f"{where} (image {image!r})")
        elif type(category) not in (int, str) or category not in names:
            tally.add("dropped", "annotation of an unknown category", f"{where} (category {category!r})")
        elif type(id) in (int, str) and known.setdefault(id, found) is not found and known[id] == found:
            tally.add("dropped", "annotation that is there twice", where)
        elif found.get("iscrowd") and rules.crowd == "drop":
            tally.add("dropped", "crowd (--crowd drop)", where)
        else:
            if type(id) in (int, str) and known[id] is not found:
                tally.add("noted", "annotation with the id of another: both are kept", where)
            if found.get("iscrowd"):
                tally.add("noted", "crowd: kept as one object", where)
            groups.setdefault(image, []).append(found)
    return groups


def _size(entry: Entry, path: Path, where: str, tally: Tally, size_of: SizeOf) -> tuple[int, int]:
    width, height = entry.get("width"), entry.get("height")
    if width is None or height is None:
        try:
            size = size_of(path)
        except OSError as error:
            raise SourceError(
                f"{where}: no width and height, and {path} cannot be read: {error}\n"
                "  give the folder of the images with --images, or add the sizes"
            ) from error
        tally.add("changed", "image without width and height: read from its file", where)
        return size
    if not all(type(side) in (int, float) and side > 0 and side % 1 == 0 for side in (width, height)):
        raise SourceError(
            f"{where}: width {width!r} and height {height!r} are not positive whole numbers\n"
            "  correct or remove them"
        )
    return int(width), int(height)


def _object(found: Entry, desc: str, size: tuple[int, int], rules: Rules, tally: Tally) -> SourceObject:
    where = _where(found)
    box = _box(found.get("bbox"), where, tally)
    wanted = rules.geometry != "box" or box is None
    rings = _rings(found.get("segmentation"), size, where, tally) if wanted else ()
    return SourceObject(desc, where, box, rings, _kept(found["category_id"], "category", tally))


def _kept(id: int | str, what: str, tally: Tally) -> int | None:
    """Return the id that goes into the record, from where predictions take it. COCO's tools know whole numbers."""
    if isinstance(id, int) and 0 <= id < LARGEST_ID:
        return id
    tally.add("noted", f"{what} id that is not a whole number from 0: it is not kept", f"{what} {id!r}")
    return None


def _where(found: Entry) -> str:
    return f"annotation {found.get('id')!r} of image {found.get('image_id')!r}"


def _box(value: Any, where: str, tally: Tally) -> Box | None:
    if value is None:
        return None
    coords = numbers(value)
    if coords is None or len(coords) != 4:
        tally.add("dropped", "bbox that is not four numbers", where)
        return None
    x, y, width, height = coords
    return x, y, x + width, y + height


def _rings(value: Any, size: tuple[int, int], where: str, tally: Tally) -> tuple[Ring, ...]:
    if value is None or value == []:
        return ()
    if isinstance(value, dict):
        return _outlines(value, size, where, tally)
    flat = numbers(value)  # one ring without the list around it
    if flat is not None:
        return (flat,)
    rings = [numbers(ring) for ring in value] if isinstance(value, list) else [None]
    if None in rings:
        tally.add("dropped", "ring that is not a list of numbers", where)
    return tuple(ring for ring in rings if ring is not None)


def _outlines(value: Entry, size: tuple[int, int], where: str, tally: Tally) -> tuple[Ring, ...]:
    try:
        mask = decode(value, *size)
    except ValueError as error:
        tally.add("dropped", f"mask: {error}", where)
        return ()
    rings, holes = trace(mask)
    if not rings:
        tally.add("dropped", "mask without a pixel", where)
    if holes:
        tally.add("changed", "mask with a hole: the hole is filled", where)
    return tuple(rings)
