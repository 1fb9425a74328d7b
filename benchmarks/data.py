"""Measure a large data file: the first and later starts, memory of a rank, time per sample, and the data doctor.

    python benchmarks/data.py [--json] [--records 10000000]

Writes a file of synthetic records to the temporary folder, 1.9 GB for ten million, and removes it. Each start is a
process of its own. The private memory of a rank does not count the pages of the index, which the ranks of a
machine share. A sample is the next number in the order, its line, and its record; in the mixture, the records are
three data sets. The doctor examines a hundredth
of the records, without images.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from ratios import Results, at_least, at_most, medians, show, without_goal

from coordexp.data import RecordFile
from coordexp.data.doctor import examine
from coordexp.train.mixture import Mixture
from coordexp.train.stream import SampleOrder

SAMPLES = 20_000
WARM_UP = 100


def write_records(path: Path, count: int) -> None:
    objects = [{"desc": "red cup", "bbox_2d": [10, 20, 110, 220]}, {"desc": "dog", "bbox_2d": [5, 5, 90, 80]}]
    head = {"width": 640, "height": 480, "space": "pixel", "objects": objects}
    rest = json.dumps(head)[1:]
    with path.open("w", buffering=2**20) as file:
        for number in range(count):
            file.write(f'{{"image": "images/{number:09d}.jpg", {rest}\n')


def anonymous_bytes() -> int:
    """Return the memory of this process without that of mapped files, which processes share."""
    (line,) = (text for text in Path("/proc/self/smaps_rollup").read_text().splitlines() if "Anonymous:" in text)
    return 1024 * int(line.split()[1])


def compare_doctors(path: Path) -> float:
    """Return how many times as fast two processes examine the file as one does, images not included."""
    times = medians({str(k): partial(examine, path, processes=k) for k in (1, 2)}, repeats=3)
    return times["1"] / times["2"]


def start(path: Path) -> dict[str, Any]:
    """Open the file as a rank does, take samples, and return what this cost."""
    before = anonymous_bytes()
    began = time.perf_counter()
    records = RecordFile(path)
    order = SampleOrder(len(records), 3, 8, seed=0, shuffled=True)
    records[order.index(0)]
    started = time.perf_counter() - began
    seconds = time_samples(records, order)
    private = anonymous_bytes() - before
    large, middle = len(records) * 6 // 10, len(records) * 3 // 10
    mixture = Mixture((2, 1, 1), (large, middle, len(records) - large - middle))
    mixed = SampleOrder(len(records), 3, 8, seed=0, shuffled=True, mixture=mixture)
    return {"start": started, "sample": seconds, "private": private, "mixed": time_samples(records, mixed)}


def time_samples(records: RecordFile, order: SampleOrder) -> float:
    """Return the seconds that a sample takes."""
    for taken in range(WARM_UP):
        records[order.index(taken)]
    began = time.perf_counter()
    for taken in range(WARM_UP, WARM_UP + SAMPLES):
        records[order.index(taken)]
    return (time.perf_counter() - began) / SAMPLES


def measure(count: int) -> Results:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "train.jsonl"
        write_records(path, count)
        words = [sys.executable, __file__, "--start", str(path)]
        first, later = (json.loads(subprocess.check_output(words)) for _ in range(2))
        short = Path(name) / "short.jsonl"
        write_records(short, count // 100)
        speed_up = compare_doctors(short)
        return {
            "records": without_goal(count),
            "gigabytes of the file": without_goal(path.stat().st_size / 1e9),
            "seconds of the first start, which writes the index": without_goal(first["start"]),
            "seconds of a later start": at_most(later["start"], 5),
            "private megabytes of a rank": at_most(later["private"] / 1e6, 100),
            "milliseconds a sample": at_most(1000 * later["sample"], 0.2),
            "milliseconds a sample of a mixture": at_most(1000 * later["mixed"], 0.2),
            "data doctor, one process / two processes": at_least(speed_up, 1.8),
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start(options.start)))
    else:
        show(measure(options.records), options.json)
