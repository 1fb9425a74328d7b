"""Broken images in a run that may leave some out (`custom.broken_images`).

An image is examined before its record is taken: it is read and decoded as the doctor does. The place of a record
whose image is broken is taken by the record after it in the order of samples, so every step has as many samples
as without broken images, on all ranks. Whether an image is broken depends on its bytes alone, and is written to
`quarantine.jsonl` in the run folder before its step. So a resumed run takes the same records, even if an
image was repaired meanwhile.

    {"record": 39, "place": "train.jsonl, record 40", "image": "images/40.jpg", "problem": "image-unreadable",
     "detail": "'images/40.jpg': image file is truncated"}
"""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from coordexp.data import Records
from coordexp.data.doctor import KINDS, Problem, look_at_image
from coordexp.data.images import read_image_facts
from coordexp.data.sets import list_addresses
from coordexp.data.stores import read_ahead
from coordexp.errors import DataError
from coordexp.files import append_line, drop_torn_line, read_json_lines
from coordexp.logs import say

FILE = "quarantine.jsonl"
FEW = 10  # broken images that never stop a run, so that one of the first images does not
THREADS = 8  # that decode images side by side


class Quarantine:
    """The records of a run whose images are broken. At most the share `most` of the examined images may be."""

    def __init__(self, records: Records, folder: Path, most: float) -> None:
        self.records, self.most, self._file = records, most, folder / FILE
        drop_torn_line(self._file)
        self.broken = set(self._read())
        self._sound = bytearray(len(records) // 8 + 1)  # a bit for each record
        self._readers = ThreadPoolExecutor(THREADS)
        self._found = self._examined = 0  # by this process

    def _read(self) -> Iterator[int]:
        """Yield the records that are listed already. A line of other data is left out."""
        for line in read_json_lines(self._file):
            record = line["record"]
            if record < len(self.records):
                file, number = self.records.locate(record)
                if file.read(number).image == line["image"]:
                    yield record

    def is_broken(self, record: int) -> bool:
        """Return True if the image of a record is broken. A record without an image has none that could be."""
        self.examine([record])
        return record in self.broken

    def examine(self, records: Iterable[int]) -> None:
        """Examine the images of records that were not examined before, side by side. Raise DataError if more
        of all images are broken than may be."""
        known = self.broken.__contains__
        new = [record for record in dict.fromkeys(records) if not known(record) and not self._is_sound(record)]
        read_ahead(list_addresses(self.records, new))
        for record, problem in zip(new, self._readers.map(self._find_problem, new), strict=True):
            self._examined += 1
            if problem is None:
                self._sound[record >> 3] |= 1 << (record & 7)
            else:
                self._add(record, problem)
        if self._found > max(FEW, self.most * self._examined):
            raise DataError(
                f"{self._found} of {self._examined} images are broken, and custom.broken_images allows a share of "
                f"{self.most:g}; {self._file} lists them",
                "see what is wrong with them: `coordexp data doctor` checks all images, and `coordexp data clean` "
                "leaves their records out",
            )

    def _is_sound(self, record: int) -> bool:
        return bool(self._sound[record >> 3] >> (record & 7) & 1)

    def _find_problem(self, index: int) -> Problem | None:
        file, number = self.records.locate(index)
        look = partial(read_image_facts, decode=True)
        _, problems = look_at_image(file.path.parent, file.read(number), look)
        return next((problem for problem in problems if KINDS[problem.code].severity == "error"), None)

    def _add(self, record: int, problem: Problem) -> None:
        file, number = self.records.locate(record)
        place, image = f"{file}, record {number + 1}", file.read(number).image
        entry = {
            "record": record,
            "place": place,
            "image": image,
            "problem": problem.code,
            "detail": problem.detail,
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        append_line(self._file, json.dumps(entry))
        self.broken.add(record)
        self._found += 1
        if self._found == 1:
            say(f"warning: {place}: {problem.detail}; it is left out, and {self._file} lists all such records")
