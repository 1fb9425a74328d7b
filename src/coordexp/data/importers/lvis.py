"""LVIS: the document of COCO, with the address of each image instead of a file name.

`http://images.cocodataset.org/val2017/000000397133.jpg` is the file `val2017/000000397133.jpg` below the folder
of images. What LVIS says about absent and unlisted categories has no place in a record: it is counted.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from coordexp.data.importers.coco import Entry, load_document, read_document
from coordexp.data.importers.source import Rules, SizeOf, SourceImage
from coordexp.data.importers.tally import Tally

_LEFT_OUT = {
    "neg_category_ids": "image with a list of absent categories: not kept, records have no place for it",
    "not_exhaustive_category_ids": "image in which not all objects of a category are marked: "
    "correct detections can count as false there",
}


def read_lvis(path: Path, images: Path, rules: Rules, tally: Tally, size_of: SizeOf) -> Iterator[SourceImage]:
    document = load_document(path)
    for entry in document["images"]:
        for key, reason in _LEFT_OUT.items():
            if entry.get(key):
                tally.add("noted", reason, f"image {entry.get('id')!r}")
    yield from read_document(document, images, rules, tally, size_of, _name)


def _name(entry: Entry) -> Any:
    """The last two parts of the address: the split and the file. A file name of its own comes first."""
    if entry.get("file_name"):
        return entry["file_name"]
    url = entry.get("coco_url")
    if not isinstance(url, str):
        return None
    return "/".join(unquote(urlsplit(url).path).split("/")[-2:])
