"""Divide the records of a file into a part to train on and a held-out part.

Which records are held out follows from the seed, the lines and the classes alone. Every record belongs to the
rarest of its classes, and every class gives its share, so that rare classes are in both parts if they have enough
records. Records with the same image stay together, so the number of held-out records may differ from the wanted
one by a few. Records without objects, and questions, are one class more. The file is parsed once, and its lines
are copied as they are. Memory grows by about 30 bytes per record.
"""

import hashlib
import math
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordexp.data.records import Record, read_any_records
from coordexp.errors import UserError
from coordexp.files import open_file, write_parts

Notify = Callable[[str], None]


@dataclass(frozen=True)
class ClassShare:
    """How many records with a class are in the file, and how many of them are held out."""

    desc: str
    records: int
    held_out: int


@dataclass(frozen=True)
class SplitReport:
    """`classes` are ordered by their number of records, the rarest first. `repeated` records have the image of an
    earlier one, and are on its side."""

    train: int
    held_out: int
    repeated: int
    classes: tuple[ClassShare, ...]


class RecordFacts:
    """The values that decide the side of each record, as numbers: a random key, its image, and its classes, of
    which `owners` are the records."""

    def __init__(self, path: Path, seed: int, notify: Notify) -> None:
        self.descs: dict[str, int] = {}  # with their numbers, in the order of the file
        classes, lengths, keys, images = array("i"), array("i"), array("Q"), array("Q")
        for number, record in read_any_records(path):
            objects = record.objects if isinstance(record, Record) else ()
            own = {self.descs.setdefault(item.desc, len(self.descs)) for item in objects}
            classes.extend(own)
            lengths.append(len(own))
            keys.append(_hash(f"{seed}:{number}"))
            image = f"{number}" if record.image is None else f"/{os.path.normpath(record.image)}"
            images.append(_hash(image))
            _tell(notify, "reading", len(lengths))
        self.keys, self.images = np.frombuffer(keys, np.uint64), np.frombuffer(images, np.uint64)
        self.classes = np.frombuffer(classes, np.int32)
        self.owners = np.repeat(np.arange(len(lengths), dtype=np.int32), np.frombuffer(lengths, np.int32))

    def __len__(self) -> int:
        return len(self.keys)

    def find_strata(self) -> NDArray[np.int32]:
        """Return the rank of the rarest class of each record. A record without objects has the last rank."""
        order = np.lexsort((np.arange(len(self.descs)), np.bincount(self.classes, minlength=len(self.descs))))
        ranks = np.empty(len(order), np.int32)
        ranks[order] = np.arange(len(order))
        strata = np.full(len(self), len(order), np.int32)
        np.minimum.at(strata, self.owners, ranks[self.classes])
        return strata


def split_records(
    path: Path, train: Path, val: Path, share: float | None, count: int | None, seed: int, notify: Notify
) -> SplitReport:
    """Write the lines of a file to two new files, in their order. Either a share or a number of records is held
    out. Raise UserError if one of the two files would be empty."""
    facts = RecordFacts(path, seed, notify)
    target = round(len(facts) * share) if share is not None else count or 0
    if not 0 < target < len(facts):
        raise UserError(
            f"{target:,} of {len(facts):,} records would be held out, so one of the two files would be empty",
            "give another --val, e.g. 0.1 or a number of records",
        )
    # The first record of each image, the image of each record, and the number of records of each image.
    _, firsts, images, sizes = np.unique(facts.images, return_index=True, return_inverse=True, return_counts=True)
    is_held_out = choose(facts.find_strata()[firsts], facts.keys[firsts], sizes, target)[images]
    if is_held_out.all() or not is_held_out.any():
        raise UserError(
            f"records with the same image stay together (records: {len(facts):,}, images: {len(firsts):,}), so "
            "one of the two files would be empty",
            "give another --val, or more images",
        )
    with write_parts(train) as to_train, write_parts(val) as to_val, open_file(path) as file:
        lines = (line for line in file if line.strip())
        for number, (line, to_held_out) in enumerate(zip(lines, is_held_out.tolist(), strict=True)):
            (to_val if to_held_out else to_train)(line.rstrip(b"\r\n") + b"\n")
            _tell(notify, "writing", number)
    of_held_out = facts.classes[is_held_out[facts.owners]]
    counts = [np.bincount(classes, minlength=len(facts.descs)) for classes in (facts.classes, of_held_out)]
    rows = [ClassShare(desc, *map(int, pair)) for desc, *pair in zip(facts.descs, *counts, strict=True)]
    rows.sort(key=lambda row: (row.records, row.desc))
    held_out = int(is_held_out.sum())
    return SplitReport(len(facts) - held_out, held_out, len(facts) - len(firsts), tuple(rows))


def choose(
    strata: NDArray[np.int32], keys: NDArray[np.uint64], sizes: NDArray[np.intp], target: int
) -> NDArray[np.bool_]:
    """Return which images are held out, such that they have about `target` records. `sizes` are the numbers of
    records of the images. Every stratum gives the images with the lowest keys, up to its share of the records.
    What rounding leaves goes to the strata with the largest remainders, and the rarest first among equal ones."""
    ranks, members = np.unique(strata, return_inverse=True)
    totals = np.bincount(members, sizes, len(ranks)).astype(np.int64)
    shares = [target * total / int(totals.sum()) for total in totals.tolist()]
    quotas = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (quotas[k] - shares[k], k))
    for k in by_remainder[: target - sum(quotas)]:
        quotas[k] += 1
    order = np.lexsort((keys, strata))
    before = np.cumsum(sizes[order]) - sizes[order]  # the records of the images that come earlier in this order
    before -= np.repeat(np.cumsum(totals) - totals, np.bincount(members))  # ... in the same stratum
    is_chosen = np.zeros(len(strata), dtype=bool)
    is_chosen[order] = before + sizes[order] / 2 <= np.array(quotas)[members[order]]
    return is_chosen


def _hash(text: str) -> int:
    """Return a number of 64 bits that is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _tell(notify: Notify, doing: str, number: int) -> None:
    if number % 10_000 == 0:
        notify(f"{doing}: {number:,} records")
