"""A run folder as it is read: settings, beginnings, files of lines; of a run that goes on, what is there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from coordexp.errors import DataError
from coordexp.files import read_json_lines

METRICS, RESOLVED, MANIFEST = "metrics.jsonl", "resolved.yaml", "run.json"
INSPECTOR, REPORT = "inspect.html", "report.html"  # where the pages of a run are looked for


@dataclass(frozen=True)
class Run:
    """`settings` is the tree of `resolved.yaml`; `beginnings` has an entry for each start and resume."""

    folder: Path
    settings: dict[str, Any]
    beginnings: tuple[dict[str, Any], ...]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def started_in(self) -> Path | None:
        """Paths in what the run wrote are as seen from there. Known when its folder is still where
        `training.output_dir` said."""
        said = Path(str((self.settings.get("training") or {}).get("output_dir") or ""))
        folder = self.folder.resolve()
        if said.is_absolute() or not said.parts or folder.parts[-len(said.parts) :] != said.parts:
            return None
        return Path(*folder.parts[: -len(said.parts)])


def read_run(folder: Path) -> Run:
    """DataError when the folder is no run's."""
    missing = [name for name in (RESOLVED, MANIFEST) if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{folder}: not the folder of a run, it has no {' and no '.join(missing)}\n"
            "  give the folder that training.output_dir names; a run that has just begun writes them soon"
        )
    settings = _read(folder / RESOLVED, yaml.safe_load, dict)
    beginnings = _read(folder / MANIFEST, json.loads, list)
    return Run(folder, settings, tuple(beginnings))


def read_lines(path: Path) -> tuple[dict[str, Any], ...]:
    """Return the objects of a JSONL file; none without one. The last line of a run that is going on, or that was
    killed, may be half there, and is left out."""
    return tuple(read_json_lines(path))


def _read(path: Path, parse: Any, kind: type) -> Any:
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, kind):
        raise DataError(f"{path}: a {kind.__name__} is expected, and this is a {type(value).__name__}")
    return value
