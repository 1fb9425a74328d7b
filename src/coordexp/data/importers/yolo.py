"""YOLO: a folder of text files beside a folder of images, one object a line, in units of the image.

`class cx cy w h` is a box and `class x y x y x y ...` a polygon. Images lead: one without a text file has no
objects. Names of the classes come from `data.yaml` or from `classes.txt`, one a line.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from coordexp.data.importers.source import Box, Ring, SizeOf, SourceError, SourceImage, SourceObject, text_of
from coordexp.data.importers.tally import Tally

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
FAR = 2.0  # a unit coordinate beyond this is no unit coordinate


def read_yolo(
    labels: Path, images: Path, names: Path | None, tally: Tally, size_of: SizeOf
) -> Iterator[SourceImage]:
    classes = _classes(names or _names_file(labels))
    pictures = _pictures(images)
    for name in sorted(p.relative_to(labels).with_suffix("") for p in labels.rglob("*.txt")):
        if name not in pictures and name.name != "classes":
            tally.add("dropped", "file of labels without an image", f"{name.as_posix()}.txt")
    for name, picture in pictures.items():
        try:
            width, height = size_of(picture)
        except OSError as error:
            tally.add("dropped", "image that cannot be read", f"{picture}: {error}")
            continue
        file = labels / name.with_name(f"{name.name}.txt")
        if not file.is_file():
            tally.add("noted", "image without a file of labels: no objects", str(picture))
        yield SourceImage(picture, width, height, tuple(_objects(file, classes, (width, height), tally)))


def _names_file(labels: Path) -> Path:
    places = [folder / name for folder in (labels, labels.parent, labels.parent.parent) for name in _NAMES]
    found = [place for place in places if place.is_file()]
    if len(found) == 1:
        return found[0]
    raise SourceError(
        f"{labels}: {'no' if not found else 'more than one'} file with the names of the classes"
        f"{': ' if found else ''}{', '.join(map(str, found))}\n  give data.yaml or classes.txt with --names"
    )


_NAMES = ("data.yaml", "data.yml", "classes.txt")


def _classes(path: Path) -> dict[int, str]:
    """By number. Numbers may have gaps in data.yaml."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix not in (".yaml", ".yml"):
            return {
                k: text_of(line.strip(), f"{path}:{k + 1}") for k, line in enumerate(text.rstrip().split("\n"))
            }
        tree = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SourceError(f"{path}: cannot be read: {error}\n  give data.yaml or classes.txt") from error
    names: Any = tree.get("names") if isinstance(tree, dict) else None
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not all(str(key).isdecimal() for key in names):
        raise SourceError(f"{path}: no names\n  write names: [cat, dog], or names: {{0: cat, 1: dog}}")
    return {int(key): text_of(name, f"{path}: names[{key}]") for key, name in names.items()}


def _pictures(folder: Path) -> dict[Path, Path]:
    """By the name that their labels have."""
    found: dict[Path, Path] = {}
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES):
        name = path.relative_to(folder).with_suffix("")
        if name in found:
            raise SourceError(
                f"{found[name]} and {path} would share the labels {name.as_posix()}.txt\n  rename or remove one"
            )
        found[name] = path
    if not found:
        raise SourceError(
            f"{folder}: no images ({', '.join(sorted(SUFFIXES))})\n  give their folder with --images"
        )
    return found


def _objects(file: Path, classes: dict[int, str], size: tuple[int, int], tally: Tally) -> Iterator[SourceObject]:
    if not file.is_file():
        return
    for number, line in enumerate(file.read_text(encoding="utf-8-sig", errors="replace").splitlines(), start=1):
        where = f"{file}:{number}"
        if not line.strip():
            continue
        values = _values(line)
        if values is None:
            tally.add("dropped", "line that is not numbers", where)
        elif values[0] not in classes:
            tally.add("dropped", "object of a class without a name", f"{where} (class {values[0]:g})")
        elif len(values) != 5 and (len(values) < 7 or len(values) % 2 == 0):
            tally.add(
                "dropped", f"line of {len(values)} numbers: neither a box (5) nor a polygon (7, 9, ...)", where
            )
        elif any(abs(value) > FAR for value in values[1:]):
            tally.add("dropped", "line whose numbers are not in units of the image (0 to 1)", where)
        else:
            box, rings = _shape(values[1:], size)
            yield SourceObject(classes[int(values[0])], where, box, rings)


def _values(line: str) -> Ring | None:
    try:
        values = tuple(map(float, line.split()))
    except ValueError:
        return None
    return values if all(abs(value) < 1e9 for value in values) else None


def _shape(values: Ring, size: tuple[int, int]) -> tuple[Box | None, tuple[Ring, ...]]:
    scaled = tuple(value * size[k % 2] for k, value in enumerate(values))
    if len(values) > 4:
        return None, (scaled,)
    x, y, width, height = scaled
    return (x - width / 2, y - height / 2, x + width / 2, y + height / 2), ()
