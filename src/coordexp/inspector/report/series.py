"""What a run logged, by name: steps and values. A metrics file of any length comes in, and arrays go out.

The file is read line by line and never held, so that a million lines are a matter of time and not of memory. A
value that was logged as null was no number: it stays, as nan. Of two values for a step the last counts.
"""

import reprlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordexp.errors import DataError
from coordexp.files import read_json_lines
from coordexp.inspector.report.forms import LARGEST, is_count, logged_number

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Series:
    """`steps` rise; `values` has nan where no number was logged."""

    steps: Steps
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float | None:
        """The last value that is a number."""
        known = self.values[np.isfinite(self.values)]
        return float(known[-1]) if len(known) else None

    @property
    def broken(self) -> Steps:
        """Where no number was logged."""
        found: Steps = self.steps[~np.isfinite(self.values)]
        return found

    def times(self, factor: float) -> "Series":
        return Series(self.steps, self.values * factor)


Log = Mapping[str, Series]
NOTHING = Series(np.zeros(0, np.int64), np.zeros(0))


def read_log(path: Path) -> dict[str, Series]:
    """Every name of `metrics.jsonl`, in the order in which they first come."""
    return series_of(read_json_lines(path), str(path))


def series_of(lines: Iterable[Mapping[str, Any]], where: str) -> dict[str, Series]:
    found: dict[str, tuple[array[int], array[float]]] = {}
    for number, line in enumerate(lines, start=1):
        step = line.get("step")
        if not is_count(step):
            raise DataError(f"{where}, line {number}: step {reprlib.repr(step)} is not a whole number")
        for name, value in line.items():
            if name == "step":
                continue
            if name not in found:
                found[name] = array("q"), array("d")
            steps, values = found[name]
            steps.append(step)
            if (type(value) is float or type(value) is int) and -LARGEST <= value <= LARGEST:
                values.append(value)
            else:
                values.append(logged_number(value, f"{where}, line {number}: {name}"))
    return {name: _series(*columns) for name, columns in found.items()}


def _series(steps: "array[int]", values: "array[float]") -> Series:
    """The last of each step, by rising steps."""
    backwards = np.frombuffer(steps, np.int64)[::-1]
    kept, first = np.unique(backwards, return_index=True)
    return Series(kept, np.frombuffer(values, np.float64)[::-1][first])


def ratio(above: Series, below: Series) -> Series:
    """Step by step, where both were logged and there is something to be a share of."""
    steps, left, right = np.intersect1d(above.steps, below.steps, assume_unique=True, return_indices=True)
    some = below.values[right] != 0
    return Series(steps[some], above.values[left][some] / below.values[right][some])


def steps_of_lines(log: Log) -> Steps:
    """How many optimizer steps each line of the loss stands for."""
    steps = log.get("loss", NOTHING).steps
    return np.diff(steps, prepend=0)
