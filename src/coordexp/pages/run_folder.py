"""Reading run folders: settings, `run.json` with an entry for every start and resume, and metrics.

Files are validated here, so the code behind can rely on their shape. A run that is still going on is read up to
what it has written so far.

Runs that differ only in seeds and names, and used the same data, form one group. Each group has a letter and a
name, in the order of the command line.
"""

import json
import os
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from coordexp.errors import DataError, explain
from coordexp.pages.curves import EMPTY, NOT_WRITTEN_BY_A_RUN, Log, Series, read_log

METRICS, RESOLVED, MANIFEST = "metrics.jsonl", "resolved.yaml", "run.json"
INSPECTOR, REPORT = "inspect.html", "report.html"  # the pages of a run, in its folder
MAX_DEPTH = 64  # objects and lists nested in each other
MAX_WIDTH = 100_000  # values at one depth; a few YAML aliases can stand for any number of them
SEEDS = ("training.seed", "training.data_seed")
NAMES = ("training.output_dir", "training.run_name", "training.logging_dir", "training.project")
LETTERS = "ABCDEFGH"  # each has its own colour, dashes and mark in the page's style
SECRET = re.compile(r"(^|_)(token|password|secret|api_key|credentials)$")
HIDDEN = "(not shown)"
MAX_LETTERS = 90  # of a value in a table

T = TypeVar("T")
Count = Annotated[int, Field(ge=0, lt=2**53)]


class RunFileModel(BaseModel):
    """A JSON object in a file of a run. Types are strict; fields that no page needs are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class DataFile(RunFileModel):
    """A data file as the run found it when it started. Data in several files has one entry in `files` for each."""

    file: str
    records: Count
    sha256: str
    files: list["DataFile"] = []

    @property
    def paths(self) -> list[Path]:
        return [Path(data.file) for data in self.files or [self]]


class ObjectiveTerm(RunFileModel):
    """A term of the loss. A diagnostic has no weight."""

    term: str
    weight: Annotated[float, Field(ge=-1e9, le=1e9)] | None


class RunObjective(RunFileModel):
    terms: list[ObjectiveTerm] = []
    masked_desc: list[str] | None = None


class RunStart(RunFileModel):
    """One start or resume of a run, as `run.json` describes it."""

    data: dict[str, DataFile] | None = None
    objective: RunObjective | None = None


STARTS = TypeAdapter(list[RunStart])


@dataclass(frozen=True, eq=False)
class Run:
    """`settings` is the tree of `resolved.yaml`. `starts` has at least one entry. `log` has the metrics, if they
    were read."""

    folder: Path
    settings: dict[str, Any]
    starts: tuple[RunStart, ...]
    log: Log = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def latest_start(self) -> RunStart:
        return self.starts[-1]

    @property
    def data(self) -> dict[str, DataFile]:
        """The data files of the latest start, by `train` and `val`."""
        return dict(self.latest_start.data or {})

    @property
    def has_complete_labels(self) -> bool:
        """Whether every object of the held-out images has a label, as the config declares."""
        return (self.settings.get("custom") or {}).get("val_labels") != "incomplete"

    @property
    def training(self) -> dict[str, Any]:
        return self.settings.get("training") or {}

    @property
    def variant(self) -> str:
        return str((self.settings.get("custom") or {}).get("trainer_variant", "run")).replace("_", " ")

    @property
    def planned_steps(self) -> int:
        """The number of steps that the run was to take; 0 if it was limited by epochs."""
        steps = self.training.get("max_steps")
        return steps if type(steps) is int and steps > 0 else 0

    @property
    def last_step(self) -> int:
        """The last step that was logged; 0 if none was."""
        return max((series.last_step for series in self.log.values()), default=0)

    @property
    def start_folder(self) -> Path | None:
        """The folder that the run was started in. The paths in its files are relative to it. None if the run
        folder is no longer where `training.output_dir` put it."""
        output_dir = Path(str(self.training.get("output_dir") or ""))
        folder = self.folder.resolve()
        depth = len(output_dir.parts)
        if output_dir.is_absolute() or not depth or folder.parts[-depth:] != output_dir.parts:
            return None
        return Path(*folder.parts[:-depth])

    def series(self, metric: str) -> Series:
        """Return the values of a metric; an empty series if it was never logged."""
        return self.log.get(metric, EMPTY)

    def term_weight(self, term: str) -> float | None:
        """Return the weight of a loss term in `run.json`; None if it is not named there or is a diagnostic."""
        terms = self.latest_start.objective.terms if self.latest_start.objective else []
        return next((row.weight for row in terms if row.term == term), None)


def read_run(folder: Path) -> Run:
    """Raise DataError if the folder is not that of a run, or if a file holds something that no run writes."""
    missing = [name for name in (RESOLVED, MANIFEST) if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{folder}: not the folder of a run, it has no {' and no '.join(missing)}",
            "give the folder that training.output_dir names; a run that has just begun writes these files soon",
        )
    settings = _read_file(folder / RESOLVED, yaml.safe_load, dict)
    for section in ("training", "custom"):
        if not isinstance(settings.get(section, {}), dict | None):
            problem = f"{folder / RESOLVED}: {section} is {reprlib.repr(settings[section])}, not an object"
            raise DataError(problem, NOT_WRITTEN_BY_A_RUN)
    starts = validate(STARTS, _read_file(folder / MANIFEST, json.loads, list), str(folder / MANIFEST))
    if not starts:
        raise DataError(f"{folder / MANIFEST}: an empty list", "every start of a run adds to it; give another run")
    return Run(folder, settings, tuple(starts))


def validate(adapter: TypeAdapter[T], value: Any, where: str) -> T:
    """Raise DataError with the file, the place and the value if the value does not fit."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        place = place.removesuffix(".[key]").removeprefix(".")
        expected = first["msg"].replace("Input", "it").removeprefix("Value error, ")
        problem = f"is {reprlib.repr(first['input'])}: {expected}"
        if first["type"] == "missing":
            problem = "is missing"
        elif first["type"] in ("model_type", "dict_type"):
            problem = f"is {reprlib.repr(first['input'])}, not an object"
        raise DataError(f"{where}: {place} {problem}", NOT_WRITTEN_BY_A_RUN) from error


def _read_file(path: Path, parse: Callable[[str], Any], kind: type) -> Any:
    with explain((ValueError, RecursionError, yaml.YAMLError), f"{path}: cannot be read"):
        value = parse(path.read_text(encoding="utf-8"))
    if not isinstance(value, kind):
        raise DataError(f"{path}: expected a {kind.__name__}, but this is a {type(value).__name__}")
    _check_size(value, str(path))
    return value


def _check_size(value: Any, where: str) -> None:
    """Raise DataError if objects and lists are nested too deeply, which may be without end, or are too many."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children = [parent.values() if isinstance(parent, dict) else parent for parent in level]
        level = [child for values in children for child in values if isinstance(child, dict | list)]
        if not level:
            return
        if len(level) > MAX_WIDTH:
            raise DataError(f"{where}: more than {MAX_WIDTH:,} values", NOT_WRITTEN_BY_A_RUN)
    raise DataError(f"{where}: more than {MAX_DEPTH} objects and lists nested in each other", NOT_WRITTEN_BY_A_RUN)


@dataclass(frozen=True, eq=False)
class RunGroup:
    letter: str
    name: str
    runs: tuple[Run, ...]

    @property
    def settings(self) -> dict[str, Any]:
        return self.runs[0].settings

    @property
    def seeds(self) -> str:
        return ", ".join(str(run.training.get("seed")) for run in self.runs)


def read_logged_run(folder: Path) -> Run:
    """Read a run with its metrics."""
    return replace(read_run(folder), log=read_log(folder / METRICS))


def group_runs(runs: Sequence[Run]) -> tuple[RunGroup, ...]:
    """Return the groups in the order of their first runs. Raise DataError if a run is given twice, if two have the
    same settings and seed (a copy says nothing about other seeds), or if there are too many groups."""
    members: dict[str, dict[str, Run]] = {}
    for run in runs:
        identity, seeds = _identify(run)
        group = members.setdefault(identity, {})
        if other := group.get(seeds):
            raise DataError(
                f"{run.folder} and {other.folder}: the same settings, data and seed ({run.training.get('seed')})",
                "a run counts once; leave one out, or give runs with other seeds",
            )
        group[seeds] = run
    if len(members) > len(LETTERS):
        raise DataError(
            f"{len(members)} groups of runs with different settings",
            f"a page compares up to {len(LETTERS)}; give fewer runs",
        )
    names: Counter[str] = Counter()
    groups = []
    for letter, group in zip(LETTERS, members.values(), strict=False):
        name = _common_name([run.name for run in group.values()])
        names[name] += 1
        unique = f"{name} ({names[name]})" if names[name] > 1 else name
        groups.append(RunGroup(letter, unique, tuple(group.values())))
    return tuple(groups)


def _identify(run: Run) -> tuple[str, str]:
    """Return a text that is the same for all runs of a group, and one that differs between its seeds. The first
    includes the hashes of the data: a file may have changed between two runs with the same settings."""
    settings = flatten_settings(run.settings)
    compared = {path: value for path, value in settings.items() if path not in (*SEEDS, *NAMES)}
    hashes = {name: file.sha256 for name, file in sorted(run.data.items())}
    return repr((sorted(compared.items(), key=itemgetter(0)), hashes)), repr([settings.get(p) for p in SEEDS])


def _common_name(names: Sequence[str]) -> str:
    prefix = os.path.commonprefix(names)  # noqa: RUF071, letter by letter is meant
    shared = re.sub(r"((^|[-_. ]+)(seed|s)\d*)?([-_. ]+\d*)?$", "", prefix)
    return names[0] if len(names) == 1 else shared or f"{names[0]} and {len(names) - 1} more"


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
            flat[here] = HIDDEN if isinstance(value, str) and SECRET.search(str(key)) else value
    return flat


def find_differences(groups: Sequence[RunGroup]) -> dict[str, tuple[Any, ...]]:
    """Return the settings that differ between groups, with one value per group; None if a group lacks the setting.
    Seeds and names do not count."""
    trees = [flatten_settings(group.settings) for group in groups]
    paths = dict.fromkeys(path for tree in trees for path in tree)
    rows = {path: tuple(tree.get(path) for tree in trees) for path in paths if path not in (*SEEDS, *NAMES)}
    return {path: row for path, row in rows.items() if any(value != row[0] for value in row)}


def format_value(value: Any) -> str:
    """Return the value of a setting as a table shows it."""
    text = "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 3]}..."
