"""Remove labels from the records of a file, to measure what training makes of incomplete ones.

Which labels go follows from the seed, the number of the line and the objects of the record alone. An image that
has objects keeps one of them, so that no record says that its image is empty.
"""

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from coordexp.data.records import Record, RecordObject, read_any_records
from coordexp.errors import UserError
from coordexp.files import write_parts

By = Literal["object", "class", "size", "crowd"]

FAVOURED = 1.7  # how much more often than on average a label of the smaller or more crowded half is removed


@dataclass(frozen=True)
class Thinned:
    """How many labels a file had, and how many of them were removed."""

    labels: int
    removed: int


def thin(path: Path, target: Path, share: float, by: By, seed: int, notify: Callable[[str], None]) -> Thinned:
    """Write the records of a file without about this share of their labels. `object` removes them independently;
    `class` removes, in each image, all objects of a class or none; `size` mostly small objects, and `crowd` mostly
    those in images with many."""
    rate = _rates(path, share, by, notify) if by in ("size", "crowd") else lambda _: share
    labels = removed = 0
    with write_parts(target) as write:
        for number, record in read_any_records(path):
            if isinstance(record, Record) and record.objects:
                draw = random.Random(f"{seed} {number}")  # noqa: S311  (not a secret)
                thinned = _thin_record(record, draw, by, rate)
                labels += len(record.objects)
                removed += len(record.objects) - len(thinned.objects)
                record = thinned
            write(record.as_json() + "\n")
            if number % 10_000 == 0:
                notify(f"writing: {number:,} records")
        if not removed:
            raise UserError(
                f"{path}: every image has only what it keeps, so no label can be removed", "try --by object"
            )
    return Thinned(labels, removed)


def _thin_record(record: Record, draw: random.Random, by: By, rate: Callable[[float], float]) -> Record:
    """Return the record without the objects whose draw is below the rate of their removal. A class that is not
    labelled completely any more leaves the list `exhaustive`, and one without a label is not asked for."""
    if by == "class":
        draws = {desc: draw.random() for desc in sorted({item.desc for item in record.objects})}
        chances = [draws[item.desc] - rate(0.0) for item in record.objects]
    else:
        chances = [draw.random() - rate(measure) for measure in _measure(record, by)]
    asked = [chance for item, chance in zip(record.objects, chances, strict=True) if item in record.asked_objects]
    least = min(0.0, max(asked or chances))  # if all would go, what is nearest to staying stays
    kept = [item for item, chance in zip(record.objects, chances, strict=True) if chance >= least]
    lost = {item.desc for item, chance in zip(record.objects, chances, strict=True) if chance < least}
    gone = lost - {item.desc for item in kept}
    classes = record.classes and tuple(desc for desc in record.classes if desc not in gone)
    exhaustive = record.exhaustive and tuple(desc for desc in record.exhaustive if desc not in lost)
    return replace(record, objects=tuple(kept), classes=classes, exhaustive=exhaustive)


def _rates(path: Path, share: float, by: By, notify: Callable[[str], None]) -> Callable[[float], float]:
    """Return the rate of removal of an object by what is measured of it. Objects up to the median have a high one,
    and the others one that makes up for it."""
    values = array("f")
    for number, record in read_any_records(path):
        if isinstance(record, Record):
            values.extend(_measure(record, by))
        if number % 10_000 == 0:
            notify(f"reading: {number:,} records")
    measured = np.frombuffer(values, np.float32)
    if not len(measured):
        return lambda _: share
    median = float(np.median(measured))
    lower = float((measured <= median).mean())
    high = min(1.0, FAVOURED * share, share / lower)
    low = (share - lower * high) / (1 - lower) if lower < 1 else 0.0
    return lambda value: high if np.float32(value) <= median else low


def _measure(record: Record, by: By) -> Sequence[float]:
    """Return a number for each object, which is low where labels are most often missing: the area of its bounding
    box as a share of the image, or the negative number of objects in the image."""
    if by == "size":
        return [_area(record, item) for item in record.objects]
    return [-float(len(record.objects))] * len(record.objects)


def _area(record: Record, item: RecordObject) -> float:
    xs, ys = item.coords[::2], item.coords[1::2]
    width, height = record.extent
    return (max(xs) - min(xs)) * (max(ys) - min(ys)) / (width * height)
