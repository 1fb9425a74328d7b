"""Divide the records of a file into a part to train on and a held-out part.

Which records are held out follows from the seed, the lines and the classes alone. Every record belongs to the
rarest of its classes, and every class gives its share, so that rare classes are in both parts if they have enough
records. Records with the same image stay together. The file is parsed once, and its lines are copied as they are.
Memory grows by about 30 bytes per record.
"""

import hashlib
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordexp.data.records import read_records
from coordexp.errors import UserError
from coordexp.files import write_parts

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
    """What decides the side of each record: its classes, a number at random, and its image, as numbers."""

    def __init__(self, path: Path, seed: int, notify: Notify) -> None:
        self.descs: dict[str, int] = {}  # with their numbers, in the order of the file
        classes, lengths, keys, images = array("i"), array("i"), array("Q"), array("Q")
        for number, record in read_records(path):
            own = {self.descs.setdefault(item.desc, len(self.descs)) for item in record.objects}
            classes.extend(own)
            lengths.append(len(own))
            keys.append(_hash(f"{seed}:{number}"))
            images.append(_hash(record.image))
            _tell(notify, "reading", len(lengths))
        self.keys, self._images = np.frombuffer(keys, np.uint64), np.frombuffer(images, np.uint64)
        self._classes = np.frombuffer(classes, np.int32)
        self._owners = np.repeat(np.arange(len(lengths), dtype=np.int32), np.frombuffer(lengths, np.int32))

    def __len__(self) -> int:
        return len(self.keys)

    def count_records(self, is_chosen: NDArray[np.bool_] | None = None) -> list[int]:
        """Return the number of records with each class, of all records or of the chosen ones."""
        classes = self._classes if is_chosen is None else self._classes[is_chosen[self._owners]]
        counts: list[int] = np.bincount(classes, minlength=len(self.descs)).tolist()
        return counts

    def find_strata(self) -> NDArray[np.int32]:
        """Return the rank of the rarest class of each record. A record without objects has the last rank."""
        order = np.lexsort((np.arange(len(self.descs)), np.array(self.count_records())))
        ranks = np.empty(len(order), np.int32)
        ranks[order] = np.arange(len(order))
        strata = np.full(len(self), len(order), np.int32)
        np.minimum.at(strata, self._owners, ranks[self._classes])
        return strata

    def find_images(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the first record of each image, and the number of the image of each record."""
        _, firsts, members = np.unique(self._images, return_index=True, return_inverse=True)
        return firsts, members


def split_records(
    path: Path, train: Path, val: Path, share: float | None, count: int | None, seed: int, notify: Notify
) -> SplitReport:
    """Write the lines of a file to two new files, in their order. Either a share or a number of records is held
    out. Raise UserError if one of the two files would be empty."""
    facts = RecordFacts(path, seed, notify)
    wanted = round(len(facts) * share) if share is not None else count or 0
    if not 0 < wanted < len(facts):
        raise UserError(
            f"{wanted:,} of {len(facts):,} records would be held out, so one of the two files would be empty",
            "give another --val, e.g. 0.1 or a number of records",
        )
    firsts, members = facts.find_images()
    is_held_out = choose(facts.find_strata()[firsts], facts.keys[firsts], wanted)[members]
    with write_parts(train) as to_train, write_parts(val) as to_val, path.open("rb") as file:
        lines = (line for line in file if line.strip())
        for number, (line, to_held_out) in enumerate(zip(lines, is_held_out.tolist(), strict=True)):
            (to_val if to_held_out else to_train)(line.rstrip(b"\r\n") + b"\n")
            _tell(notify, "writing", number)
    counts = zip(facts.descs, facts.count_records(), facts.count_records(is_held_out), strict=True)
    classes = sorted((ClassShare(*row) for row in counts), key=lambda row: (row.records, row.desc))
    held_out = int(is_held_out.sum())
    return SplitReport(len(facts) - held_out, held_out, len(facts) - len(firsts), tuple(classes))


def choose(strata: NDArray[np.int32], keys: NDArray[np.uint64], wanted: int) -> NDArray[np.bool_]:
    """Return which records are held out: from each stratum those with the lowest keys, as many as its share. What
    rounding leaves goes to the strata with the largest remainders, and the rarest first among equal ones."""
    wanted = min(wanted, len(strata) - 1)
    sizes = np.unique(strata, return_counts=True)[1].tolist()
    shares = [wanted * size / len(strata) for size in sizes]
    quotas = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(sizes)), key=lambda k: (quotas[k] - shares[k], k))
    for k in by_remainder[: wanted - sum(quotas)]:
        quotas[k] += 1
    order = np.lexsort((keys, strata))
    is_chosen = np.zeros(len(strata), dtype=bool)
    start = 0
    for size, quota in zip(sizes, quotas, strict=True):
        is_chosen[order[start : start + quota]] = True
        start += size
    return is_chosen


def _hash(text: str) -> int:
    """Return a number of 64 bits that is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _tell(notify: Notify, doing: str, number: int) -> None:
    if number % 10_000 == 0:
        notify(f"{doing}: {number:,} records")
