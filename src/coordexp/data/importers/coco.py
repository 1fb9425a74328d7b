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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from coordexp.data.importers.source import (
    Dropped,
    ImportCounts,
    Ring,
    Rules,
    SourceImage,
    SourceObject,
    check_name,
    read_json,
    read_numbers,
    read_size,
    resolve_image,
)
from coordexp.data.masks import decode_mask, trace_outlines
from coordexp.data.records import LARGEST_ID
from coordexp.errors import DataError

JsonObject = dict[str, Any]
NOT_EXHAUSTIVE = (
    "image in which not all objects of a category are marked: correct detections can count as false there"
)


def read_coco(path: Path, images: Path, rules: Rules, counts: ImportCounts) -> Iterator[SourceImage]:
    yield from _read_document(_load_document(path), images, rules, counts)


def read_lvis(path: Path, images: Path, rules: Rules, counts: ImportCounts) -> Iterator[SourceImage]:
    document = _load_document(path)
    for image in document["images"]:
        if image.get("not_exhaustive_category_ids"):
            counts.add("noted", NOT_EXHAUSTIVE, f"image {image.get('id')!r}")
        url = image.get("coco_url")
        if not image.get("file_name") and isinstance(url, str):  # the last two parts: the split and the file
            image["file_name"] = "/".join(unquote(urlsplit(url).path).split("/")[-2:])
    yield from _read_document(document, images, rules, counts, is_lvis=True)


def _load_document(path: Path) -> JsonObject:
    document = read_json(path, "give the file of annotations")
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
    document: JsonObject, folder: Path, rules: Rules, counts: ImportCounts, is_lvis: bool = False
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
        stated = [(image.get("width"), image.get("height"))]
        size = read_size(stated, path, f"{where}: no width and height", where, counts)
        own = annotations.pop(id, [])
        kept = [annotation for annotation in own if not _is_dropped_crowd(annotation, rules)]
        objects = [_read_object(annotation, names, size, rules, counts) for annotation in kept]
        unlabelled = {annotation["category_id"] for annotation in own if _is_dropped_crowd(annotation, rules)}
        exhaustive = _find_exhaustive(image, own, names, unlabelled, is_lvis)
        yield SourceImage(path, *size, tuple(objects), keep_id(id, "image", counts), exhaustive)


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
    for annotation in annotations:
        where, image, category = _describe(annotation), annotation.get("image_id"), annotation.get("category_id")
        if type(image) not in (int, str) or image not in images:
            counts.add("dropped", "annotation of an unknown image", f"{where} (image {image!r})")
        elif type(category) not in (int, str) or category not in names:
            counts.add("dropped", "annotation of an unknown category", f"{where} (category {category!r})")
        else:
            if _is_dropped_crowd(annotation, rules):
                counts.add("dropped", "crowd (--crowd drop)", where)
            elif annotation.get("iscrowd"):
                counts.add("noted", "crowd: kept as one object", where)
            groups.setdefault(image, []).append(annotation)
    return groups


def _read_object(
    annotation: JsonObject, names: Mapping[Any, str], size: tuple[int, int], rules: Rules, counts: ImportCounts
) -> SourceObject:
    where, category, bbox = _describe(annotation), annotation["category_id"], annotation.get("bbox")
    box, rings = None, list[Ring]()
    if (numbers := read_numbers(bbox)) is not None and len(numbers) == 4:
        x, y, width, height = numbers
        box = (x, y, x + width, y + height)
    elif bbox is not None:
        counts.add("changed", "bbox that is not four numbers: it is ignored", where)
    if rules.geometry != "box" or box is None:
        with counts.dropping(where):
            rings = read_rings(annotation.get("segmentation"), size, where, counts)
    return SourceObject(names[category], where, box, tuple(rings), keep_id(category, "category", counts))


def keep_id(id: int | str, what: str, counts: ImportCounts) -> int | None:
    """Return the id for the record, from which predictions take it, or None: COCO's tools know only whole
    numbers."""
    if isinstance(id, int) and 0 <= id < LARGEST_ID:
        return id
    counts.add("noted", f"{what} id that is not a whole number from 0: it is not kept", f"{what} {id!r}")
    return None


def _describe(annotation: JsonObject) -> str:
    return f"annotation {annotation.get('id')!r} of image {annotation.get('image_id')!r}"


def read_rings(value: Any, size: tuple[int, int], where: str, counts: ImportCounts) -> list[Ring]:
    if not value and not isinstance(value, str | dict):
        return []
    if isinstance(value, dict):
        try:
            rings, holes = trace_outlines(decode_mask(value, *size))
        except ValueError as error:
            raise Dropped(f"mask: {error}") from error
        if not rings:
            raise Dropped("mask without a pixel")
        if holes:
            counts.add("changed", "mask with a hole: the hole is filled", where)
        return rings
    if (flat := read_numbers(value)) is not None:  # a single ring without the list around it
        return [flat]
    listed = [read_numbers(ring) for ring in value] if isinstance(value, list) else [None]
    if None in listed:
        counts.add("dropped", "ring that is not a list of numbers", where)
    return [ring for ring in listed if ring is not None]
