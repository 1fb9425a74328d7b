"""Loads settings: read the YAML, take out legacy and refused keys, check values, check rules, derive values.

All violations are collected before any is reported. To go on after a wrong value, it is replaced by a valid one,
and conflicts that involve a replaced value are dropped. So each mistake gives one message, without follow-up
errors.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordexp.config import paths, schema
from coordexp.config.derive import derive, idle_settings
from coordexp.config.legacy import RejectedKey, take_out_legacy
from coordexp.config.paths import Key, KeyPath, format_path, parse_path, value_at
from coordexp.config.refused import take_out_refused
from coordexp.config.rules import World, find_conflicts
from coordexp.config.settings import Settings
from coordexp.config.violations import ConfigError, Violation
from coordexp.config.wording import closest_module, closest_option, explain_error
from coordexp.config.yaml_tree import Document, Tree, read_document

# How similar a wrong word must be to an allowed one to be replaced by it in further checks.
CERTAIN_SIMILARITY = 0.85
MAX_LISTED_KEYS = 25  # A message does not list the keys of a larger section.


@dataclass(frozen=True)
class Loaded:
    """Validated settings. `origins` maps each value to where it came from; `notes` name what has no effect."""

    settings: Settings
    origins: dict[str, str]
    notes: tuple[str, ...]
    files: tuple[str, ...]


def load_settings(path: Path | str, world: World | None = None) -> Loaded:
    """Return the settings of a YAML file and of the files it extends. Raise ConfigError with all violations."""
    return parse_settings(read_document(Path(path)), world, file=str(path))


def parse_settings(document: Document | Tree, world: World | None = None, file: str = "") -> Loaded:
    """Return the settings of a tree in memory. Raise ConfigError with all violations."""
    if not isinstance(document, Document):
        document = Document(tree=document)
    world = world or World()
    settings, violations = _validate(paths.copy_tree(document.tree), world)
    violations = [*document.violations, *violations]
    if violations:
        raise ConfigError(_in_file_order(violations, document), file)
    notes = tuple(idle_settings(settings))
    settings, reasons = derive(settings, world)
    origins = {format_path(path): str(origin) for path, origin in document.origins.items()}
    origins |= {path: f"derived: {reason}" for path, reason in reasons.items()}
    return Loaded(settings, origins, notes, tuple(document.files))


def _in_file_order(violations: list[Violation], document: Document) -> list[Violation]:
    """Return the violations with their origins, sorted by file and line. Those without an origin come last."""

    def position(violation: Violation) -> tuple[int, int]:
        origin = document.origin_of(violation.path)
        return (document.files.index(origin.file), origin.line) if origin else (len(document.files), 0)

    ordered = sorted(violations, key=position)
    return [replace(v, origin=v.origin or _origin_text(document, v.path)) for v in ordered]


def _origin_text(document: Document, path: KeyPath) -> str | None:
    origin = document.origin_of(path)
    return str(origin) if origin else None


def _validate(tree: Tree, world: World) -> tuple[Settings, list[Violation]]:
    rejected = [*take_out_legacy(tree), *map(RejectedKey, take_out_refused(tree)), *_take_out_unknown(tree)]
    settings, violations, replaced = _check_values(tree)
    for conflict in find_conflicts(settings, world):
        involved = [parse_path(path) for path in (conflict.path, *conflict.others)]
        if not any(_overlap(left, right) for left in replaced for right in involved):
            violations.append(Violation(parse_path(conflict.path), conflict.problem, conflict.fix))
    moves = [move for key in rejected for move in key.moves]
    return settings, [key.violation for key in rejected] + [_at_written_path(v, moves) for v in violations]


def _overlap(left: KeyPath, right: KeyPath) -> bool:
    """Return whether the paths are equal or one of them contains the other."""
    return all(key == other for key, other in zip(left, right, strict=False))


def _at_written_path(violation: Violation, moves: list[tuple[KeyPath, KeyPath]]) -> Violation:
    """Return the violation at the path that the file has, if its value was moved for further checks."""
    path = violation.path
    for old, new in reversed(moves):
        if path[: len(new)] == new:
            path = (*old, *path[len(new) :])
    return replace(violation, path=path)


def _take_out_unknown(tree: Tree) -> Iterator[RejectedKey]:
    """Remove keys that the schema does not have. The value of a misspelt key moves to the key that was meant."""
    while errors := [e for e in _errors(tree) if e["type"] in ("extra_forbidden", "union_tag_invalid")]:
        unknown = [error for error in errors if error["type"] == "extra_forbidden"]
        if not unknown:
            renamed = [rejected for error in errors if (rejected := _rename_module(error, tree))]
            if not renamed:
                return
            yield from renamed
            continue
        path = _tree_path(unknown[0], tree)
        *parent, key = path
        value = value_at(tree, path[:-1]).pop(key)
        target = _guess_key(tuple(parent), str(key), tree)
        if target is None:
            yield RejectedKey(Violation(path, "unknown key", _list_keys(tuple(parent), tree)))
            continue
        filled = paths.fill(tree, value, target)
        if filled == [target] and not isinstance(value, dict) and target in _wrong_paths(tree):
            value_at(tree, target[:-1]).pop(target[-1])  # The value is wrong there, so only suggest the key.
            filled = []
        moves = tuple(((*path, *new[len(target) :]), new) for new in filled)
        yield RejectedKey(Violation(path, "unknown key", f"did you mean {format_path(target)}?"), moves)


def _rename_module(error: Any, tree: Tree) -> RejectedKey | None:
    """Correct the name of a module that is almost right and return the violation, or None if no name is close."""
    path = _tree_path(error, tree)
    name = closest_module(error, path, tree, CERTAIN_SIMILARITY)
    if name is None:
        return None
    violation = explain_error(error, path, tree)
    value_at(tree, path)["name"] = name
    return RejectedKey(violation)


def _wrong_paths(tree: Tree) -> set[KeyPath]:
    return {_tree_path(error, tree) for error in _errors(tree)}


def _list_keys(parent: KeyPath, tree: Tree) -> str:
    names = schema.names_at(parent, tree)
    if len(names) > MAX_LISTED_KEYS:
        return f"coordexp config reference lists the {len(names)} keys of {format_path(parent)}"
    return f"allowed here: {', '.join(names) or 'nothing'}"


def _guess_key(parent: KeyPath, key: str, tree: Tree) -> KeyPath | None:
    """Return a key of the same section with a similar name, or else the only setting elsewhere with this name."""
    close = difflib.get_close_matches(key, schema.names_at(parent, tree), n=1, cutoff=0.75)
    if close:
        return (*parent, close[0])
    same = [path for path in schema.all_paths() if path[-1] == key]
    return same[0] if len(same) == 1 else None


def _check_values(tree: Tree) -> tuple[Settings, list[Violation], list[KeyPath]]:
    """Return settings, the violations of single values, and the paths at which a value had to be replaced."""
    errors = _errors(tree)
    violations: dict[KeyPath, Violation] = {}
    for error in errors:
        path = _tree_path(error, tree)
        violations.setdefault(path, explain_error(error, path, tree))
    replaced: list[KeyPath] = []
    while errors:
        path = _tree_path(errors[0], tree)
        if option := closest_option(errors[0], path, tree, CERTAIN_SIMILARITY):
            value_at(tree, path[:-1])[path[-1]] = option
        else:
            replaced.append(_replace_with_valid(tree, path))
        errors = _errors(tree)
    return Settings.model_validate(tree), list(violations.values()), replaced


def _errors(tree: Tree) -> list[Any]:
    try:
        Settings.model_validate(tree)
    except ValidationError as invalid:
        return [error for error in invalid.errors(include_url=False) if not _is_follow_up(error)]
    return []


def _is_follow_up(error: Any) -> bool:
    """Return whether pydantic only calls a list too short because its items are wrong."""
    return error["type"] == "too_short" and bool(len(error["input"]) >= error["ctx"]["min_length"])


def _tree_path(error: Any, tree: Any) -> KeyPath:
    """Return the path in the file for pydantic's location, which also names the union member that it tried."""
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


def _replace_with_valid(tree: Tree, path: KeyPath) -> KeyPath:
    """Write a valid value at `path`, or at the nearest path above it that has one. Return the path written."""
    for end in range(len(path), 0, -1):
        here = path[:end]
        node = schema.node_at(here, tree)
        if isinstance(here[-1], int):
            continue
        if node is not None and (value := schema.valid_value(node)) != value_at(tree, here):
            value_at(tree, here[:-1])[here[-1]] = paths.copy_tree(value)
            return here
    raise AssertionError(f"no valid value is known for {format_path(path)}")
