"""Read YOLO: a folder of text files beside a folder of images, with one object per line, in units of the image.

`class cx cy w h` is a box and `class x y x y x y ...` a polygon. Every image becomes a record; one without a text
file has no objects. The names of the classes come from `data.yaml`, or from `classes.txt` with one name per line.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from coordexp.data.images import read_image_size
from coordexp.data.importers.source import LARGEST, Dropped, ImportCounts, SourceImage, SourceObject, check_name
from coordexp.errors import DataError, explain
from coordexp.files import read_file

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
FAR = 2.0  # a number beyond this cannot be in units of the image
_NAMES_FILES = ("data.yaml", "data.yml", "classes.txt")


def read_yolo(labels: Path, images: Path, names: Path | None, counts: ImportCounts) -> Iterator[SourceImage]:
    classes = read_classes(names or _find_names_file(labels))
    paths = _find_images(images)
    for name in sorted(p.relative_to(labels).with_suffix("") for p in labels.rglob("*.txt")):
        if name not in paths and name.name != "classes":
            counts.add("dropped", "file of labels without an image", f"{name.as_posix()}.txt")
    for name, path in paths.items():
        try:
            size = read_image_size(path)
        except OSError as error:
            counts.add("dropped", "image that cannot be read", f"{path}: {error}")
            continue
        file = labels / name.with_name(f"{name.name}.txt")
        if not file.is_file():
            counts.add("noted", "image without a file of labels: no objects", str(path))
        yield SourceImage(path, *size, tuple(_read_objects(file, classes, size, counts)))


def find_split(file: Path, split: str) -> tuple[Path, Path]:
    """Return the folders of labels and of images of a split of data.yaml, as Ultralytics finds them: labels are in
    a folder `labels` in place of the last `images` of the path, or else beside the images."""
    tree = _read_yaml(file)
    entry = tree.get(split) if isinstance(tree, dict) else None
    if not isinstance(entry, str):
        raise DataError(f"{file}: {split} is not a folder of images", "give the folder of labels and --images")
    root = file.parent / str(tree.get("path") or "")
    found = [root / name for name in (entry, entry.removeprefix("../")) if (root / name).is_dir()]
    if not found:
        raise DataError(f"{file}: {split} is {root / entry}, which is not a folder", "correct path or " + split)
    images = found[0] / "images" if (found[0] / "images").is_dir() else found[0]
    head, separator, tail = f"{images}/".rpartition("/images/")
    return Path(f"{head}/labels/{tail}" if separator else images), images


def _find_names_file(labels: Path) -> Path:
    folders = (labels, labels.parent, labels.parent.parent)
    files = [folder / name for folder in folders for name in _NAMES_FILES if (folder / name).is_file()]
    if len(files) == 1:
        return files[0]
    raise DataError(
        f"{labels}: {'no' if not files else 'more than one'} file with the names of the classes"
        f"{': ' if files else ''}{', '.join(map(str, files))}",
        "give data.yaml or classes.txt with --names",
    )


def read_classes(path: Path) -> dict[int, str]:
    """Return the names by class number. Numbers may have gaps in data.yaml."""
    if path.suffix not in (".yaml", ".yml"):
        with explain((OSError, ValueError), f"{path}: cannot be read", "give data.yaml or classes.txt"):
            lines = read_file(path).decode("utf-8-sig").rstrip().split("\n")
        return {k: check_name(line.strip(), f"{path}:{k + 1}") for k, line in enumerate(lines)}
    tree = _read_yaml(path)
    names: Any = tree.get("names") if isinstance(tree, dict) else None
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not all(_is_number(key) for key in names):
        raise DataError(f"{path}: no names", "write names: [cat, dog], or names: {0: cat, 1: dog}")
    return {int(key): check_name(name, f"{path}: names[{key}]") for key, name in names.items()}


def _read_yaml(path: Path) -> Any:
    kinds = (OSError, ValueError, RecursionError, yaml.YAMLError)  # YAML reads dates and numbers: ValueError
    with explain(kinds, f"{path}: cannot be read", "give data.yaml or classes.txt"):
        return yaml.safe_load(read_file(path).decode("utf-8-sig"))


def _is_number(key: Any) -> bool:
    text = str(key)
    return text.isdecimal() and len(text) < 10


def _find_images(folder: Path) -> dict[Path, Path]:
    """Return the image files by the name of their labels."""
    images: dict[Path, Path] = {}
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES):
        name = path.relative_to(folder).with_suffix("")
        if name in images:
            raise DataError(
                f"{images[name]} and {path} would share the labels {name.as_posix()}.txt",
                "rename or remove one of them",
            )
        images[name] = path
    if not images:
        raise DataError(
            f"{folder}: no images ({', '.join(sorted(SUFFIXES))})", "give the folder of the images with --images"
        )
    return images


def _read_objects(
    file: Path, classes: dict[int, str], size: tuple[int, int], counts: ImportCounts
) -> Iterator[SourceObject]:
    if not file.is_file():
        return
    for number, line in enumerate(file.read_text(encoding="utf-8-sig", errors="replace").splitlines(), start=1):
        if line.strip():
            with counts.dropping(f"{file}:{number}"):
                yield _read_object(line, f"{file}:{number}", classes, size)


def _read_object(line: str, where: str, classes: dict[int, str], size: tuple[int, int]) -> SourceObject:
    try:
        number, *values = map(float, line.split())
    except ValueError:
        raise Dropped("line that is not numbers") from None
    if not all(abs(value) < LARGEST for value in (number, *values)):
        raise Dropped("line that is not numbers")
    if number not in classes:
        raise Dropped("object of a class without a name")
    if len(values) != 4 and (len(values) < 6 or len(values) % 2):
        raise Dropped(f"line of {len(values) + 1} numbers: neither a box (5) nor a polygon (7, 9, ...)")
    if any(abs(value) > FAR for value in values):
        raise Dropped("line whose numbers are not in units of the image (0 to 1)")
    scaled = tuple(value * size[k % 2] for k, value in enumerate(values))
    if len(scaled) > 4:
        return SourceObject(classes[int(number)], where, None, (scaled,))
    x, y, width, height = scaled
    return SourceObject(
        classes[int(number)], where, (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    )
