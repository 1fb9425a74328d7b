"""A run folder as a report takes it, checked once: what is behind this needs no second look at its form."""

from pathlib import Path
from typing import Any

from coordexp.errors import DataError
from coordexp.inspector.report.groups import Logged
from coordexp.inspector.report.series import read_log
from coordexp.inspector.run import MANIFEST, METRICS, RESOLVED, read_run

TERM = {"term": str, "weight": (int, float, type(None)), "channels": list, "divided_by": (str, list)}
DATA = {"file": str, "records": int, "sha256": str}


def read_logged(folder: Path) -> Logged:
    """DataError when the folder is no run's, or has what no run writes."""
    run = read_run(folder)
    for name in ("training", "custom"):
        _check(run.settings.get(name, {}), {}, f"{folder / RESOLVED}: {name}")
    if not run.beginnings:
        raise DataError(f"{folder / MANIFEST}: an empty list\n  every start of a run adds to it; give another run")
    for k, beginning in enumerate(run.beginnings):
        _check_beginning(beginning, f"{folder / MANIFEST}: [{k}]")
    return Logged(run, read_log(folder / METRICS))


def _check_beginning(beginning: Any, where: str) -> None:
    _check(beginning, {}, where)
    for name in ("packages", "data", "objective"):
        _check(beginning.get(name) or {}, {}, f"{where}.{name}")
    for name, about in (beginning.get("data") or {}).items():
        _check(about, DATA, f"{where}.data.{name}")
    objective = beginning.get("objective") or {}
    _check(objective, {"terms": list} if objective else {}, f"{where}.objective")
    for j, term in enumerate(objective.get("terms", ())):
        _check(term, TERM, f"{where}.objective.terms[{j}]")
    _check(objective.get("idle") or {}, {}, f"{where}.objective.idle")


def _check(value: Any, needed: dict[str, Any], where: str) -> None:
    problems = [] if isinstance(value, dict) else [f"{value!r:.60} is not an object"]
    if not problems:
        wrong = [name for name, kind in needed.items() if name not in value or not isinstance(value[name], kind)]
        problems = [f"{name} {value.get(name)!r:.60} is not what a run writes" for name in wrong]
    if problems:
        raise DataError(
            f"{where}: {problems[0]}\n  the file was changed, or is of another program; give another run"
        )
