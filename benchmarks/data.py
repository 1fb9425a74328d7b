"""Measure a large data set: the first and later starts, memory of a rank, time per sample, and the data doctor.

    python benchmarks/data.py [--json] [--records 100000000]

Writes synthetic records to the temporary folder, 12 GB for a hundred million, and removes them: as one file, as
16 files, and a hundredth of them as files of 1,000 records. Each start is a process of its own. The private memory
of a rank does not count the pages of the index, which the ranks of a machine share. A sample is the next number in
the order, its line, and its record; in the mixture, the records are three data sets. The doctor examines a
thousandth of the records, without images.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ratios import Results, at_least, at_most, medians, show, without_goal

from coordexp.data import Records, open_data
from coordexp.data.doctor import examine
from coordexp.train.mixture import Mixture
from coordexp.train.stream import SampleOrder

SAMPLES = 20_000
WARM_UP = 100
FILES = 16
SMALL_FILE = 1_000  # records


def write_records(path: Path, count: int, first: int = 0) -> None:
    item = {"desc": "cup", "bbox_2d": [10, 20, 110, 220]}
    record = {"image": "0" * 10, "width": 640, "height": 480, "space": "pixel", "objects": [item]}
    line = np.frombuffer(f"{json.dumps(record, separators=(',', ':'))}\n".encode(), dtype=np.uint8)
    powers = 10 ** np.arange(9, -1, -1)
    with path.open("wb") as file:
        for begin in range(first, first + count, 10**6):
            numbers = np.arange(begin, min(begin + 10**6, first + count))
            lines = np.tile(line, (len(numbers), 1))
            lines[:, 10:20] = numbers[:, None] // powers % 10 + ord("0")
            file.write(lines.data)


def anonymous_bytes() -> int:
    """Return the memory of this process without that of mapped files, which processes share."""
    (line,) = (text for text in Path("/proc/self/smaps_rollup").read_text().splitlines() if "Anonymous:" in text)
    return 1024 * int(line.split()[1])


def compare_doctors(path: Path) -> float:
    """Return how many times as fast two processes examine the file as one does, images not included."""
    times = medians({str(k): partial(examine, path, processes=k) for k in (1, 2)}, repeats=3)
    return times["1"] / times["2"]


def start(paths: list[Path]) -> dict[str, Any]:
    """Open the files as a rank does, take samples, and return what this cost."""
    before, largest = anonymous_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    records = open_data([paths])
    order = SampleOrder(len(records), 3, 8, seed=0, shuffled=True)
    records[order.index(0)]
    started = time.perf_counter() - began
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - largest) * 1024
    seconds = time_samples(records, order)
    private = anonymous_bytes() - before
    large, middle = len(records) * 6 // 10, len(records) * 3 // 10
    mixture = Mixture((2, 1, 1), (large, middle, len(records) - large - middle))
    mixed = time_samples(records, SampleOrder(len(records), 3, 8, seed=0, shuffled=True, mixture=mixture))
    return {"start": started, "sample": seconds, "private": private, "mixed": mixed, "peak": peak}


def time_samples(records: Records, order: SampleOrder) -> float:
    """Return the seconds that a sample takes."""
    for taken in range(WARM_UP):
        records[order.index(taken)]
    began = time.perf_counter()
    for taken in range(WARM_UP, WARM_UP + SAMPLES):
        records[order.index(taken)]
    return (time.perf_counter() - began) / SAMPLES


def start_twice(paths: list[Path]) -> list[dict[str, Any]]:
    """Return what the first start costs, which writes the indices, and what a later one costs."""
    words = [sys.executable, __file__, "--start", *map(str, paths)]
    return [json.loads(subprocess.check_output(words)) for _ in range(2)]


def write_files(folder: Path, count: int, files: int) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"part-{k:05}.jsonl" for k in range(files)]
    for k, path in enumerate(paths):
        write_records(path, count // files, count // files * k)
    return paths


def measure(count: int) -> Results:
    results: Results = {"records": without_goal(count)}
    small = count // 100
    for name, records, files in (
        ("one file", count, 1),
        (f"{FILES} files", count, FILES),
        (f"{small:,} records in files of {SMALL_FILE:,}", small, small // SMALL_FILE),
    ):
        with tempfile.TemporaryDirectory() as folder:
            paths = write_files(Path(folder) / "data", records, files)
            first, later = start_twice(paths)
            gigabytes = sum(path.stat().st_size for path in paths) / 1e9
        results |= {
            f"{name}: gigabytes": without_goal(gigabytes),
            f"{name}: seconds of the first start, which writes indices": without_goal(first["start"]),
            f"{name}: megabytes that the first start needs": without_goal(first["peak"] / 1e6),
            f"{name}: seconds of a later start": at_most(later["start"], 5),
            f"{name}: private megabytes of a rank": at_most(later["private"] / 1e6, 100),
            f"{name}: milliseconds a sample": at_most(1000 * later["sample"], 0.3),
            f"{name}: milliseconds a sample of a mixture": at_most(1000 * later["mixed"], 0.3),
        }
    with tempfile.TemporaryDirectory() as folder:
        (short,) = write_files(Path(folder) / "data", count // 1000, 1)
        results["data doctor, one process / two processes"] = at_least(compare_doctors(short), 1.8)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--records", type=int, default=100_000_000)
    parser.add_argument("--start", type=Path, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start(options.start)))
    else:
        show(measure(options.records), options.json)
