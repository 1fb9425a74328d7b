"""Image files without labels: those of folders and of a list of paths, in a fixed order, with their sizes."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordexp.data.images import read_image_size
from coordexp.errors import UserError, describe_exception
from coordexp.tasks import ignore

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image, and its size after the rotation that its EXIF data ask for."""

    path: Path
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """The images, and the files that are not images with the reason for each."""

    images: tuple[ImageFile, ...]
    skipped: tuple[tuple[Path, str], ...]


def find_images(sources: Sequence[Path], notify: Callable[[int], None] = ignore) -> ImageFiles:
    """Return the images of folders (and their subfolders, by name) and of single files, each file once. Only
    headers are read. `notify` gets the number of files so far. Raise UserError if a source does not exist, or if
    there is no image."""
    images, skipped, seen = list[ImageFile](), list[tuple[Path, str]](), set[Path]()
    for number, path in enumerate(_list_files(sources), start=1):
        notify(number)
        if (resolved := path.resolve()) in seen:
            continue
        seen.add(resolved)
        if path.suffix.lower() not in SUFFIXES:
            skipped.append((path, f"its name does not end in {', '.join(SUFFIXES)}"))
            continue
        try:
            images.append(ImageFile(path, *read_image_size(path)))
        except OSError as error:
            skipped.append((path, describe_exception(error)))
    if not images:
        names = ", ".join(str(source) for source in sources[:3])
        raise UserError(f"no image in {names}", f"give images or folders with images ({', '.join(SUFFIXES)})")
    return ImageFiles(tuple(images), tuple(skipped))


def _list_files(sources: Sequence[Path]) -> Iterator[Path]:
    for source in sources:
        if source.is_dir():
            yield from _walk(source)
        elif source.exists():
            yield source
        else:
            raise UserError(f"{source} does not exist", "give images or folders with images")


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders. Hidden files and folders are left out, and links to folders
    are not followed."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(parent, name)
