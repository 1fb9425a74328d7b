"""From a YAML file to settings: read, take out legacy keys, check keys and values, check rules, derive.

Every violation is collected before anything is reported (D4). To be able to go on after one, a wrong value
is replaced by one that fits; conflicts that rest on a replaced value are dropped, so a mistake gives one
message and not the three that follow from it.
"""

import copy
import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordexp.config import legacy, schema
from coordexp.config.derive import derive, notes
from coordexp.config.rules import World, conflicts
from coordexp.config.settings import Settings
from coordexp.config.violations import ConfigError, Key, Violation, dotted
from coordexp.config.wording import close_option, violation_of
from coordexp.config.yaml_tree import Document, Tree, read_document


@dataclass(frozen=True)
class Loaded:
    """Validated settings; `origins` says of each value where it came from, `notes` what has no effect."""

    settings: Settings
    origins: dict[str, str]
    notes: tuple[str, ...]
    files: tuple[str, ...]


def load_settings(path: Path | str, world: World | None = None) -> Loaded:
    """The settings in a YAML file and the files it extends, or a ConfigError with all that is wrong."""
    return parse_settings(read_document(Path(path)), world)


def parse_settings(document: Document | Tree, world: World | None = None) -> Loaded:
    """The same for a tree that is already in memory."""
    if not isinstance(document, Document):
        document = Document(tree=document)
    world = world or World()
    settings, violations = _validate(copy.deepcopy(document.tree), world)
    if violations:
        raise ConfigError(_in_file_order(violations, document))
    idle = tuple(notes(settings))
    settings, reasons = derive(settings, world)
    origins = {dotted(path): str(origin) for path, origin in document.origins.items()}
    origins |= {path: f"derived: {reason}" for path, reason in reasons.items()}
    return Loaded(settings, origins, idle, tuple(document.files))


def _in_file_order(violations: list[Violation], document: Document) -> list[Violation]:
    placed = [(document.origin_of(violation.path), violation) for violation in violations]
    placed.sort(key=lambda pair: (pair[0] is None, pair[0] and (document.files.index(pair[0].file), pair[0].line)))
    return [replace(violation, origin=str(origin) if origin else None) for origin, violation in placed]


def _validate(tree: Tree, world: World) -> tuple[Settings, list[Violation]]:
    violations = list(legacy.take_out(tree))
    violations += _take_out_unknown(tree)
    settings, wrong, doubtful = _check_values(tree)
    violations += wrong
    for conflict in conflicts(settings, world):
        if not any(_touches(doubt, path) for doubt in doubtful for path in (conflict.path, *conflict.others)):
            violations.append(Violation(_keys(conflict.path), conflict.problem, conflict.fix))
    return settings, violations


def _touches(doubt: str, path: str) -> bool:
    """Whether one is the other, or contains it."""
    short, long = sorted((doubt, path), key=len)
    return long == short or long.startswith((f"{short}.", f"{short}[")) or not short


def _keys(path: str) -> tuple[Key, ...]:
    parts = path.replace("[", ".[").split(".")
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in parts)


def _take_out_unknown(tree: Tree) -> Iterator[Violation]:
    """Removes keys the schema does not have. One that is meant for another gives its value to that one."""
    while unknown := [error for error in _errors(tree) if error["type"] == "extra_forbidden"]:
        path = _tree_path(unknown[0], tree)
        *parent, key = path
        value = _container(tree, path).pop(key)
        target = _meant(tuple(parent), str(key), tree)
        if target is None:
            allowed = ", ".join(schema.names_at(tuple(parent), tree)) or "nothing"
            yield Violation(path, "unknown key", f"allowed here: {allowed}")
            continue
        yield Violation(path, "unknown key", f"did you mean {dotted(target)}?")
        if all(isinstance(_at(tree, target[:end]), dict) for end in range(len(target))):
            _container(tree, target).setdefault(target[-1], value)


def _meant(parent: tuple[Key, ...], key: str, tree: Tree) -> tuple[Key, ...] | None:
    """A key of a similar name beside it, or the only key of this name elsewhere."""
    close = difflib.get_close_matches(key, schema.names_at(parent, tree), n=1, cutoff=0.75)
    if close:
        return (*parent, close[0])
    same = [path for path, _ in schema.leaves() if path[-1] == key]
    return same[0] if len(same) == 1 else None


def _check_values(tree: Tree) -> tuple[Settings, list[Violation], list[str]]:
    """Settings that stand as far as `tree` allows, what is wrong with the rest of it, and which paths had
    to be filled with something the user may not have meant."""
    errors = _errors(tree)
    violations: dict[tuple[Key, ...], Violation] = {}
    for error in errors:
        path = _tree_path(error, tree)
        violations.setdefault(path, violation_of(error, path, tree))
    doubtful: list[str] = []
    while errors:
        path = _tree_path(errors[0], tree)
        if guess := close_option(errors[0], path, tree):
            _container(tree, path)[path[-1]] = guess
        else:
            doubtful.append(dotted(_mend(tree, path)))
        errors = _errors(tree)
    return Settings.model_validate(tree), list(violations.values()), doubtful


def _errors(tree: Tree) -> list[Any]:
    try:
        Settings.model_validate(tree)
    except ValidationError as error:
        return list(error.errors(include_url=False))
    return []


def _tree_path(error: Any, tree: Any) -> tuple[Key, ...]:
    """The path in the file for pydantic's location, which also names the branch of a union it tried."""
    path: list[Key] = []
    for key in error["loc"]:
        is_item = isinstance(tree, list) and isinstance(key, int) and key < len(tree)
        if is_item or (isinstance(tree, dict) and key in tree):
            tree = tree[key]
        elif isinstance(tree, dict) and tree.get("name") == key:
            continue  # the kind of module, not a key
        elif error["type"] != "missing":
            break
        path.append(key)
    return tuple(path)


def _mend(tree: Tree, path: tuple[Key, ...]) -> tuple[Key, ...]:
    """Puts a fitting value at `path`, or at the nearest place above it that has one; says where."""
    for end in range(len(path), 0, -1):
        here = path[:end]
        node = schema.node_at(here, tree)
        if isinstance(here[-1], int):
            continue
        if node is not None and (value := schema.stand_in(node)) != _at(tree, here):
            _container(tree, here)[here[-1]] = copy.deepcopy(value)
            return here
    raise AssertionError(f"no value is known to fit {dotted(path)}")


def _container(tree: Any, path: tuple[Key, ...]) -> Any:
    return _at(tree, path[:-1])


def _at(tree: Any, path: tuple[Key, ...]) -> Any:
    for key in path:
        if isinstance(tree, dict):
            tree = tree.get(str(key))
        elif isinstance(tree, list) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree
