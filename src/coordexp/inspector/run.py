"""Reading a run folder: the resolved settings, and `run.json` with an entry for every start and resume.

Both files are validated here, so the code behind can rely on their shape. A run that is still going on is read up
to what it has written so far.
"""

import json
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from coordexp.errors import DataError, explain
from coordexp.files import read_json_lines

METRICS, RESOLVED, MANIFEST = "metrics.jsonl", "resolved.yaml", "run.json"
INSPECTOR, REPORT = "inspect.html", "report.html"  # the pages of a run, in its folder
LARGEST_NUMBER = 1e100  # so that sums and products of the numbers on a page stay finite
MAX_DEPTH = 64  # objects and lists nested in each other
MAX_WIDTH = 100_000  # values at one depth; a few YAML aliases can stand for any number of them
NOT_WRITTEN_BY_A_RUN = "the file was edited, or another program wrote it; give another run"

T = TypeVar("T")


def _to_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _check_number(value: float) -> float:
    if not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
        raise ValueError(f"it should be a number up to {LARGEST_NUMBER:g}")
    return value


Count = Annotated[int, Field(ge=0, lt=2**53)]
Number = Annotated[float, AfterValidator(_check_number)]


class RunFileModel(BaseModel):
    """A JSON object in a file of a run. Types are strict; fields that no page needs are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class DataFile(RunFileModel):
    """A data file as the run found it when it started."""

    file: str
    records: Count
    sha256: str

    def __str__(self) -> str:
        return f"{self.file}, {self.records} records, sha256 {self.sha256}"


class ObjectiveTerm(RunFileModel):
    """A term of the loss. A diagnostic has no weight."""

    term: str
    weight: Number | None
    channels: list[str]
    divided_by: Annotated[list[str], BeforeValidator(_to_list)]


class RunObjective(RunFileModel):
    """The objective of a run. `idle` names the modules that do not run and says why."""

    terms: list[ObjectiveTerm]
    idle: dict[str, Any] | None = None
    masked_desc: list[str] | None = None


def _to_no_objective(value: Any) -> Any:
    return None if value == {} else value


class RunStart(RunFileModel):
    """One start or resume of a run, as `run.json` describes it."""

    command: list[str] | None = None
    files: list[str] | None = None
    python: Any = ""
    packages: dict[str, Any] | None = None
    git: Any = None
    data: dict[str, DataFile] | None = None
    objective: Annotated[RunObjective | None, BeforeValidator(_to_no_objective)] = None
    rollouts: Any = None


STARTS = TypeAdapter(list[RunStart])


@dataclass(frozen=True)
class Run:
    """`settings` is the tree of `resolved.yaml`. `starts` has at least one entry."""

    folder: Path
    settings: dict[str, Any]
    starts: tuple[RunStart, ...]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def latest_start(self) -> RunStart:
        return self.starts[-1]

    @property
    def training(self) -> dict[str, Any]:
        return self.settings.get("training") or {}

    @property
    def custom(self) -> dict[str, Any]:
        return self.settings.get("custom") or {}

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


def read_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """Return the objects of a JSONL file, none if it does not exist. A torn last line is left out."""
    return tuple(read_json_lines(path))


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
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
        if len(level) > MAX_WIDTH:
            raise DataError(f"{where}: more than {MAX_WIDTH:,} values", NOT_WRITTEN_BY_A_RUN)
    raise DataError(f"{where}: more than {MAX_DEPTH} objects and lists nested in each other", NOT_WRITTEN_BY_A_RUN)


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
