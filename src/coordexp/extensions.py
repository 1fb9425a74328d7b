"""Parts that other installed packages add to this one. A package announces a part with an entry point:

    [project.entry-points."coordexp.objectives"]
    focal = "my_losses:Focal"

The groups are `coordexp.objectives`, `coordexp.rollout_backends`, `coordexp.importers` and `coordexp.families`.
docs/extending.md shows what a part of each group has to be.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from coordexp.errors import UserError


@cache
def find_extensions(group: str) -> Mapping[str, EntryPoint]:
    """Return the parts that installed packages announce in a group, by name. Nothing is imported."""
    return {entry.name: entry for entry in entry_points(group=f"coordexp.{group}")}


def load_extension(entry: EntryPoint) -> Any:
    """Import a part. Raise UserError if that fails, whatever the reason: it is the code of another package."""
    try:
        return entry.load()
    except Exception as error:
        package = entry.dist.name if entry.dist else "an installed package"
        problem = f"{package} adds `{entry.name}` to {entry.group}, but {entry.value} cannot be imported: {error}"
        raise UserError(problem, f"repair {package}, or uninstall it") from error
