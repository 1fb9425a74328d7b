"""A run folder as a report takes it, checked once: what is behind this needs no second look at its form."""

from pathlib import Path
from typing import Any

from coordexp.errors import DataError
from coordexp.inspector.report.forms import (
    Is,
    check_depth,
    check_form,
    either,
    is_count,
    is_list_of,
    is_none,
    is_number,
    is_object,
    is_text,
)
from coordexp.inspector.report.groups import Logged
from coordexp.inspector.report.series import read_log
from coordexp.inspector.run import MANIFEST, METRICS, RESOLVED, read_run

TEXTS = is_list_of(is_text)
BEGINNING: dict[str, Is] = {
    "command": TEXTS,
    "files": TEXTS,
    "packages": is_object,
    "data": is_object,
    "objective": is_object,
}
TERM: dict[str, Is] = {
    "term": is_text,
    "weight": either(is_number, is_none),
    "channels": TEXTS,
    "divided_by": either(is_text, TEXTS),
}
DATA: dict[str, Is] = {"file": is_text, "records": is_count, "sha256": is_text}


def read_logged(folder: Path) -> Logged:
    """DataError when the folder is no run's, or has what no run writes."""
    run = read_run(folder)
    settings, manifest = folder / RESOLVED, folder / MANIFEST
    check_depth(run.settings, str(settings))
    for name in ("training", "custom"):
        check_form(run.settings.get(name, {}), {}, f"{settings}: {name}")
    if not run.beginnings:
        raise DataError(f"{manifest}: an empty list\n  every start of a run adds to it; give another run")
    for k, beginning in enumerate(run.beginnings):
        _check_beginning(beginning, f"{manifest}: [{k}]")
    return Logged(run, read_log(folder / METRICS))


def _check_beginning(beginning: Any, where: str) -> None:
    check_depth(beginning, where)
    check_form(beginning, {}, where, BEGINNING)
    for name, about in (beginning.get("data") or {}).items():
        check_form(about, DATA, f"{where}.data.{name}")
    objective = beginning.get("objective") or {}
    needed = {"terms": is_list_of(is_object)} if objective else {}
    check_form(objective, needed, f"{where}.objective", {"idle": is_object, "masked_desc": TEXTS})
    for j, term in enumerate(objective.get("terms", ())):
        check_form(term, TERM, f"{where}.objective.terms[{j}]")
