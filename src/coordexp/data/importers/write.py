"""Source images to a JSONL file of records, one after the other.

The file appears under its name only when it is complete. Image paths are relative to its folder.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from coordexp.data.importers.shape import settle
from coordexp.data.importers.source import Rules, SourceError, SourceImage
from coordexp.data.importers.tally import Tally
from coordexp.data.records import Record


def write_records(
    images: Iterable[SourceImage], target: Path, rules: Rules, tally: Tally, tell: Callable[[int], None]
) -> None:
    """`tell` hears the number of images read so far. SourceError if most of the image files are not there: then
    the folder of images is wrong."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            for number, image in enumerate(images, start=1):
                tell(number)
                record = _record(image, target.parent, rules, tally)
                if record is not None:
                    file.write(record.as_json() + "\n")
                    tally.images += 1
                    tally.objects += len(record.objects)
        _check_missing(tally, rules)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _record(image: SourceImage, folder: Path, rules: Rules, tally: Tally) -> Record | None:
    size = (image.width, image.height)
    objects = tuple(shape for found in image.objects for shape in settle(found, size, rules, tally))
    if not objects and rules.empty == "drop":
        tally.add("dropped", "image without objects (--empty drop)", str(image.path))
        return None
    if not objects:
        tally.add("noted", "image without objects: kept", str(image.path))
    if not image.path.is_file():
        tally.missing += 1
        tally.first_missing = tally.first_missing or str(image.path)
        if rules.missing == "drop":
            tally.add("dropped", "image file that is not there (--missing drop)", str(image.path))
            return None
        tally.add(
            "noted",
            "image file that is not there: its record is written, and training would stop at it",
            str(image.path),
        )
    return Record(_relative(image.path, folder), *size, "pixel", objects, image.image_id)


def _check_missing(tally: Tally, rules: Rules) -> None:
    images = tally.images + (tally.missing if rules.missing == "drop" else 0)
    if rules.missing == "keep" or tally.missing * 2 <= images:
        return
    raise SourceError(
        f"{tally.missing:,} of {images:,} image files are not there, the first is {tally.first_missing}\n"
        "  give the folder of the images with --images; --missing keep writes the records without their files"
    )


def _relative(path: Path, folder: Path) -> str:
    """As it is written where that stays below the folder, else between the real places: links have no parents."""
    plain = os.path.relpath(path, folder)
    if plain.startswith(".."):
        plain = os.path.relpath(path.parent.resolve() / path.name, folder.resolve())
    return Path(plain).as_posix()
