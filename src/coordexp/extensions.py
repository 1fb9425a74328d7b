"""Parts that other installed packages add to this one. A package announces a part with an entry point:

    [project.entry-points."coordexp.objectives"]
    focal = "my_losses:Focal"

The groups are `coordexp.objectives`, `coordexp.correction_policies`, `coordexp.rollout_backends`,
`coordexp.importers` and `coordexp.families`. docs/extending.md shows what a part of each group has to be.
"""

import warnings
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any

from coordexp.errors import UserError


@cache
def find_extensions(group: str, taken: frozenset[str]) -> Mapping[str, EntryPoint]:
    """Return the parts that installed packages announce in a group, by name. Nothing is imported.

    A part with the name of one of ours (`taken`), or of one that was found before, is left out with a warning."""
    parts: dict[str, EntryPoint] = {}
    for entry in _read_entry_points().select(group=f"coordexp.{group}"):
        if entry.name in taken or entry.name in parts:
            problem = f"{_package(entry)} adds `{entry.name}` to {entry.group}, but this name is taken"
            warnings.warn(f"{problem}; {entry.value} is not used", stacklevel=2)
        else:
            parts[entry.name] = entry
    return parts


@cache
def _read_entry_points() -> Any:
    """Return the entry points of all packages. It takes some hundredths of a second to read them."""
    return entry_points()


def load_extension(entry: EntryPoint) -> Any:
    """Import a part. Raise UserError if that fails, whatever the reason: it is the code of another package."""
    try:
        return entry.load()
    except Exception as error:
        package = _package(entry)
        problem = f"{package} adds `{entry.name}` to {entry.group}, but {entry.value} cannot be imported: {error}"
        raise UserError(problem, f"repair {package}, or uninstall it") from error


def resolve_part(name: str) -> Any:
    """Import what an extension names as `module:name`. Raise UserError if there is no such thing."""
    try:
        return resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{name} cannot be imported: {error}", "correct the package that names it") from error


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an installed package"
