"""Groups of runs. Runs that differ only in seeds and names, and used the same data, form one group.

Each group has a letter and a name, in the order of the command line. This module also finds the settings in which
groups differ.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from coordexp.errors import DataError
from coordexp.inspector.report.series import EMPTY, Log, Series, read_log
from coordexp.inspector.run import METRICS, DataFile, Run, read_run

SEEDS = ("training.seed", "training.data_seed")
NAMES = ("training.output_dir", "training.run_name", "training.logging_dir", "training.project")
LETTERS = "ABCDEFGH"  # each has its own colour, dashes and mark in the page's style
SECRET = re.compile(r"(^|_)(token|password|secret|api_key|credentials)$")
HIDDEN = "(not shown)"


@dataclass(frozen=True, eq=False)
class LoggedRun:
    """A run with the metrics that it logged."""

    run: Run
    log: Log

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def seed(self) -> Any:
        return self.run.training.get("seed")

    @property
    def data(self) -> dict[str, DataFile]:
        """The data files of the latest start, by `train` and `val`."""
        return dict(self.run.latest_start.data or {})

    def series(self, metric: str) -> Series:
        """Return the values of a metric; an empty series if it was never logged."""
        return self.log.get(metric, EMPTY)


@dataclass(frozen=True, eq=False)
class RunGroup:
    letter: str
    name: str
    runs: tuple[LoggedRun, ...]

    @property
    def settings(self) -> dict[str, Any]:
        return self.runs[0].run.settings

    @property
    def seeds(self) -> str:
        return ", ".join(str(run.seed) for run in self.runs)


def read_logged_run(folder: Path) -> LoggedRun:
    """Raise DataError if the folder is not that of a run, or if a file holds something that no run writes."""
    return LoggedRun(read_run(folder), read_log(folder / METRICS))


def group_runs(runs: Sequence[LoggedRun]) -> tuple[RunGroup, ...]:
    """Return the groups in the order of their first runs. Raise DataError if a run is given twice or if there are
    too many groups."""
    _check_unique(runs)
    members: dict[str, list[LoggedRun]] = {}
    for run in runs:
        members.setdefault(_identity(run), []).append(run)
    if len(members) > len(LETTERS):
        raise DataError(
            f"{len(members)} groups of runs with different settings",
            f"a page compares up to {len(LETTERS)}; give fewer runs",
        )
    for group in members.values():
        _check_seeds(group)
    names = _number_duplicates([_common_name(group) for group in members.values()])
    return tuple(
        RunGroup(letter, name, tuple(group))
        for letter, name, group in zip(LETTERS, names, members.values(), strict=False)
    )


def flatten_settings(settings: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return every value by its dotted path, without secrets. List items that have a name are addressed by it."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            flat |= flatten_settings(value, here)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for k, item in enumerate(value):
                fields = {name: field for name, field in item.items() if name != "name"}
                flat |= flatten_settings(fields, f"{here}[{item.get('name', k)}]")
        else:
            flat[here] = _hide_secret(str(key), value)
    return flat


def hide_secrets(value: Any, key: str = "") -> Any:
    """Return a copy of settings in which secrets are replaced by a remark."""
    if isinstance(value, dict):
        return {name: hide_secrets(child, str(name)) for name, child in value.items()}
    return [hide_secrets(child) for child in value] if isinstance(value, list) else _hide_secret(key, value)


def find_differences(groups: Sequence[RunGroup]) -> dict[str, tuple[Any, ...]]:
    """Return the settings that differ between groups, with one value per group; None if a group lacks the setting.
    Seeds and names do not count."""
    trees = [flatten_settings(group.settings) for group in groups]
    paths = dict.fromkeys(path for tree in trees for path in tree)
    rows = {path: tuple(tree.get(path) for tree in trees) for path in paths if path not in (*SEEDS, *NAMES)}
    return {path: row for path, row in rows.items() if any(value != row[0] for value in row)}


def _hide_secret(key: str, value: Any) -> Any:
    return HIDDEN if isinstance(value, str) and SECRET.search(key) else value


def _check_unique(runs: Sequence[LoggedRun]) -> None:
    seen = set()
    for logged in runs:
        folder = logged.run.folder.resolve()
        if folder in seen:
            raise DataError(f"{logged.run.folder}: given twice", "a run counts once; leave one out")
        seen.add(folder)


def _check_seeds(group: Sequence[LoggedRun]) -> None:
    """Raise DataError for a copy of a run: it says nothing about other seeds."""
    seen: dict[str, LoggedRun] = {}
    for logged in group:
        settings = flatten_settings(logged.run.settings)
        seeds = repr([settings.get(path) for path in SEEDS])
        if other := seen.get(seeds):
            raise DataError(
                f"{logged.run.folder} and {other.run.folder}: the same settings, data and seed ({logged.seed})",
                "they count as one run; leave one out, or give runs with other seeds",
            )
        seen[seeds] = logged


def _identity(logged: LoggedRun) -> str:
    """Return a text that is the same for all runs of a group. It includes the hashes of the data: a file may have
    changed between two runs with the same settings."""
    settings = flatten_settings(logged.run.settings)
    compared = {path: value for path, value in settings.items() if path not in (*SEEDS, *NAMES)}
    hashes = {name: file.sha256 for name, file in sorted(logged.data.items())}
    return repr((sorted(compared.items(), key=itemgetter(0)), hashes))


def _common_name(group: Sequence[LoggedRun]) -> str:
    names = [run.name for run in group]
    if len(names) == 1:
        return names[0]
    columns = zip(*names, strict=False)
    prefix = "".join(letters[0] for letters in itertools.takewhile(_are_equal, columns))
    shared = re.sub(r"((^|[-_. ]+)(seed|s)\d*)?([-_. ]+\d*)?$", "", prefix)
    return shared or f"{names[0]} and {len(names) - 1} more"


def _are_equal(letters: Sequence[str]) -> bool:
    return len(set(letters)) == 1


def _number_duplicates(names: Sequence[str]) -> list[str]:
    """Append a number to names that occurred before."""
    unique: list[str] = []
    for k, name in enumerate(names):
        earlier = names[:k].count(name)
        unique.append(f"{name} ({earlier + 1})" if earlier else name)
    return unique
