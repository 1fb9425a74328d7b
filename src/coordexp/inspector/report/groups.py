"""Which runs belong together: those that differ in seeds and names alone are one group, and so is their data.

Runs come in, in the order of the command line; groups with a letter and a name go out, and what differs between
the settings of groups.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordexp.errors import DataError
from coordexp.inspector.report.series import Log
from coordexp.inspector.run import Run

SEEDS = ("training.seed", "training.data_seed")
NAMES = ("training.output_dir", "training.run_name", "training.logging_dir", "training.project")
LETTERS = "ABCDEFGH"  # each with its own colour, dashes and mark in the page's style
SECRET = re.compile(r"(^|_)(token|password|secret|api_key|credentials)$")
HIDDEN = "(not shown)"


@dataclass(frozen=True, eq=False)
class Logged:
    """A run with what it logged."""

    run: Run
    log: Log

    @property
    def seed(self) -> Any:
        return (self.run.settings.get("training") or {}).get("seed")

    @property
    def data(self) -> dict[str, Any]:
        """By `train` and `val`: file, records and hash, as the last start found them."""
        return dict(self.latest.get("data") or {})

    @property
    def latest(self) -> dict[str, Any]:
        """Start or resume, as `run.json` has it."""
        return self.run.beginnings[-1]


@dataclass(frozen=True, eq=False)
class Group:
    letter: str
    name: str
    runs: tuple[Logged, ...]

    @property
    def settings(self) -> dict[str, Any]:
        return self.runs[0].run.settings

    @property
    def seeds(self) -> str:
        return ", ".join(str(logged.seed) for logged in self.runs)


def grouped(runs: Sequence[Logged]) -> tuple[Group, ...]:
    """In the order in which the first run of each comes. DataError for a run given twice, or too many groups."""
    _check_once(runs)
    found: dict[str, list[Logged]] = {}
    for logged in runs:
        found.setdefault(_identity(logged), []).append(logged)
    if len(found) > len(LETTERS):
        raise DataError(
            f"{len(found)} groups of runs with different settings\n"
            f"  a page compares up to {len(LETTERS)}; give fewer runs"
        )
    for group in found.values():
        _check_seeds(group)
    names = _unlike([_name(group) for group in found.values()])
    return tuple(
        Group(letter, name, tuple(group))
        for letter, name, group in zip(LETTERS, names, found.values(), strict=False)
    )


def flat(settings: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Every value by its dotted path; members of a list that have a name, by that. Secrets are not shown."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            found |= flat(value, here)
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            for k, one in enumerate(value):
                found |= flat({n: v for n, v in one.items() if n != "name"}, f"{here}[{one.get('name', k)}]")
        else:
            found[here] = _shown(str(key), value)
    return found


def without_secrets(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: without_secrets(each, str(name)) for name, each in value.items()}
    return [without_secrets(each) for each in value] if isinstance(value, list) else _shown(key, value)


def differences(groups: Sequence[Group]) -> dict[str, tuple[Any, ...]]:
    """Settings that are not the same in all groups, with the value of each; None where one has no such setting."""
    trees = [flat(group.settings) for group in groups]
    paths = dict.fromkeys(path for tree in trees for path in tree)
    rows = {path: tuple(tree.get(path) for tree in trees) for path in paths if path not in (*SEEDS, *NAMES)}
    return {path: row for path, row in rows.items() if any(value != row[0] for value in row)}


def _shown(key: str, value: Any) -> Any:
    return HIDDEN if isinstance(value, str) and SECRET.search(key) else value


def _check_once(runs: Sequence[Logged]) -> None:
    seen = set()
    for logged in runs:
        place = logged.run.folder.resolve()
        if place in seen:
            raise DataError(f"{logged.run.folder}: given twice\n  a run counts once; leave one out")
        seen.add(place)


def _check_seeds(group: Sequence[Logged]) -> None:
    """A copy of a run says nothing about other seeds."""
    seen: dict[str, Logged] = {}
    for logged in group:
        seeds = repr([flat(logged.run.settings).get(path) for path in SEEDS])
        if other := seen.get(seeds):
            raise DataError(
                f"{logged.run.folder} and {other.run.folder}: the same settings, data and seed ({logged.seed})\n"
                "  they count as one run; leave one out, or give runs of other seeds"
            )
        seen[seeds] = logged


def _identity(logged: Logged) -> str:
    """Data that was changed between two runs makes them different, whatever their settings."""
    settings = flat(logged.run.settings)
    kept = {path: value for path, value in settings.items() if path not in (*SEEDS, *NAMES)}
    hashes = {name: about.get("sha256") for name, about in sorted(logged.data.items())}
    return repr((sorted(kept.items(), key=lambda item: item[0]), hashes))


def _name(group: Sequence[Logged]) -> str:
    names = [logged.run.name for logged in group]
    if len(names) == 1:
        return names[0]
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    shared = re.sub(r"((^|[-_. ]+)(seed|s)\d*)?([-_. ]+\d*)?$", "", "".join(letters[0] for letters in alike))
    return shared or f"{names[0]} and {len(names) - 1} more"


def _unlike(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        again = sum(1 for earlier in names[: len(found)] if earlier == name)
        found.append(f"{name} ({again + 1})" if again else name)
    return found
