"""Write source images to a JSONL file of records, one after the other.

The file appears under its name only when it is complete. Image paths are relative to its folder.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from coordexp.data.importers.shape import convert_object
from coordexp.data.importers.source import ImportCounts, Rules, SourceImage
from coordexp.data.records import Record
from coordexp.errors import DataError


def write_records(
    images: Iterable[SourceImage], target: Path, rules: Rules, counts: ImportCounts, notify: Callable[[int], None]
) -> None:
    """Write the records. `notify` is called with the number of images read so far. Raise DataError if most of the
    image files are missing, because then the folder of images is the wrong one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    with ExitStack() as cleanup:
        cleanup.callback(part.unlink, missing_ok=True)
        with part.open("w", encoding="utf-8") as file:
            for number, image in enumerate(images, start=1):
                notify(number)
                record = _convert_image(image, target.parent, rules, counts)
                if record is not None:
                    file.write(record.as_json() + "\n")
                    counts.images += 1
                    counts.objects += len(record.objects)
        _check_missing(counts, rules)
        part.replace(target)


def _convert_image(image: SourceImage, folder: Path, rules: Rules, counts: ImportCounts) -> Record | None:
    """Return the record of an image, or None if the rules drop it."""
    size = (image.width, image.height)
    objects = tuple(item for source in image.objects for item in convert_object(source, size, rules, counts))
    if not objects and rules.empty == "drop":
        counts.add("dropped", "image without objects (--empty drop)", str(image.path))
        return None
    if not objects:
        counts.add("noted", "image without objects: kept", str(image.path))
    if not image.path.is_file():
        counts.missing += 1
        counts.first_missing = counts.first_missing or str(image.path)
        if rules.missing == "drop":
            counts.add("dropped", "image file that does not exist (--missing drop)", str(image.path))
            return None
        counts.add(
            "noted",
            "image file that does not exist: its record is written, and training would stop at it",
            str(image.path),
        )
    return Record(_relative_path(image.path, folder), *size, "pixel", objects, image.image_id)


def _check_missing(counts: ImportCounts, rules: Rules) -> None:
    images = counts.images + (counts.missing if rules.missing == "drop" else 0)
    if rules.missing == "keep" or counts.missing * 2 <= images:
        return
    raise DataError(
        f"{counts.missing:,} of {images:,} image files do not exist; the first is {counts.first_missing}",
        "give the folder of the images with --images; --missing keep writes the records without their files",
    )


def _relative_path(path: Path, folder: Path) -> str:
    """Return the path relative to the folder. Links are kept in a path below the folder; they are resolved in any
    other path, because `..` after a link leads to the parent of its target."""
    relative = os.path.relpath(path, folder)
    if relative.startswith(".."):
        relative = os.path.relpath(path.parent.resolve() / path.name, folder.resolve())
    return Path(relative).as_posix()
