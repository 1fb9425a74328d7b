"""From a YAML file to settings: read, take out legacy and refused keys, check values, check rules, derive.

Every violation is collected before anything is reported (D4). To be able to go on after one, a wrong value
is replaced by one that fits; conflicts that rest on a replaced value are dropped, so a mistake gives one
message and not the three that follow from it.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordexp.config import legacy, paths, schema
from coordexp.config.derive import derive, notes
from coordexp.config.legacy import Found
from coordexp.config.paths import dotted, keys_of, value_at
from coordexp.config.refused import take_out_refused
from coordexp.config.rules import World, conflicts
from coordexp.config.settings import Settings
from coordexp.config.violations import ConfigError, Violation
from coordexp.config.wording import near_module, near_option, violation_of
from coordexp.config.yaml_tree import Document, Tree, read_document

SURELY = 0.85  # how alike two words must be for one to be taken for the other in further checks
LONG = 25  # keys in a mapping that are too many to list in a message


@dataclass(frozen=True)
class Loaded:
    """Validated settings; `origins` says of each value where it came from, `notes` what has no effect."""

    settings: Settings
    origins: dict[str, str]
    notes: tuple[str, ...]
    files: tuple[str, ...]


def load_settings(path: Path | str, world: World | None = None) -> Loaded:
    """The settings in a YAML file and the files it extends, or a ConfigError with all that is wrong."""
    return parse_settings(read_document(Path(path)), world, file=str(path))


def parse_settings(document: Document | Tree, world: World | None = None, file: str = "") -> Loaded:
    """The same for a tree that is already in memory."""
    if not isinstance(document, Document):
        document = Document(tree=document)
    world = world or World()
    settings, violations = _validate(paths.unshared(document.tree), world)
    violations = [*document.violations, *violations]
    if violations:
        raise ConfigError(_in_file_order(violations, document), file)
    idle = tuple(notes(settings))
    settings, reasons = derive(settings, world)
    origins = {dotted(path): str(origin) for path, origin in document.origins.items()}
    origins |= {path: f"derived: {reason}" for path, reason in reasons.items()}
    return Loaded(settings, origins, idle, tuple(document.files))


def _in_file_order(violations: list[Violation], document: Document) -> list[Violation]:
    placed = [(document.origin_of(violation.path), violation) for violation in violations]
    placed.sort(key=lambda pair: (pair[0] is None, pair[0] and (document.files.index(pair[0].file), pair[0].line)))
    return [replace(v, origin=v.origin or (str(origin) if origin else None)) for origin, v in placed]


def _validate(tree: Tree, world: World) -> tuple[Settings, list[Violation]]:
    found = [*legacy.take_out(tree), *map(Found, take_out_refused(tree)), *_take_out_unknown(tree)]
    settings, wrong, doubtful = _check_values(tree)
    for conflict in conflicts(settings, world):
        touched = [keys_of(path) for path in (conflict.path, *conflict.others)]
        if not any(_touches(doubt, path) for doubt in doubtful for path in touched):
            wrong.append(Violation(keys_of(conflict.path), conflict.problem, conflict.fix))
    moves = [move for item in found for move in item.moves]
    return settings, [item.violation for item in found] + [_where_written(v, moves) for v in wrong]


def _touches(doubt: paths.Path, path: paths.Path) -> bool:
    """Whether one is the other, or contains it."""
    return all(left == right for left, right in zip(doubt, path, strict=False))


def _where_written(violation: Violation, moves: list[tuple[paths.Path, paths.Path]]) -> Violation:
    """At the path that the file has, where the value was moved for the sake of the checks."""
    path = violation.path
    for old, new in reversed(moves):
        if path[: len(new)] == new:
            path = (*old, *path[len(new) :])
    return replace(violation, path=path)


def _take_out_unknown(tree: Tree) -> Iterator[Found]:
    """Removes keys the schema does not have. One that is meant for another gives its value to that one."""
    while errors := [e for e in _errors(tree) if e["type"] in ("extra_forbidden", "union_tag_invalid")]:
        unknown = [error for error in errors if error["type"] == "extra_forbidden"]
        if not unknown:
            renamed = [found for error in errors if (found := _rename_module(error, tree))]
            if not renamed:
                return
            yield from renamed
            continue
        path = _tree_path(unknown[0], tree)
        *parent, key = path
        value = value_at(tree, path[:-1]).pop(key)
        target = _meant(tuple(parent), str(key), tree)
        if target is None:
            yield Found(Violation(path, "unknown key", _allowed(tuple(parent), tree)))
            continue
        filled = paths.move(tree, value, target)
        if filled == [target] and not isinstance(value, dict) and target in _wrong_paths(tree):
            value_at(tree, target[:-1]).pop(target[-1])  # it does not fit there: a suggestion is all it can be
            filled = []
        moves = tuple(((*path, *place[len(target) :]), place) for place in filled)
        yield Found(Violation(path, "unknown key", f"did you mean {dotted(target)}?"), moves)


def _rename_module(error: Any, tree: Tree) -> Found | None:
    """A module whose name is nearly right is taken for the one that was meant."""
    path = _tree_path(error, tree)
    name = near_module(error, path, tree, SURELY)
    if name is None:
        return None
    violation = violation_of(error, path, tree)
    value_at(tree, path)["name"] = name
    return Found(violation)


def _wrong_paths(tree: Tree) -> set[paths.Path]:
    return {_tree_path(error, tree) for error in _errors(tree)}


def _allowed(parent: paths.Path, tree: Tree) -> str:
    names = schema.names_at(parent, tree)
    if len(names) > LONG:
        return f"coordexp config reference lists the {len(names)} keys of {dotted(parent)}"
    return f"allowed here: {', '.join(names) or 'nothing'}"


def _meant(parent: paths.Path, key: str, tree: Tree) -> paths.Path | None:
    """A key of a similar name beside it, or the only key or section of this name elsewhere."""
    close = difflib.get_close_matches(key, schema.names_at(parent, tree), n=1, cutoff=0.75)
    if close:
        return (*parent, close[0])
    same = [path for path in schema.places() if path[-1] == key]
    return same[0] if len(same) == 1 else None


def _check_values(tree: Tree) -> tuple[Settings, list[Violation], list[paths.Path]]:
    """Settings that stand as far as `tree` allows, what is wrong with the rest of it, and which paths had
    to be filled with something the user may not have meant."""
    errors = _errors(tree)
    violations: dict[paths.Path, Violation] = {}
    for error in errors:
        path = _tree_path(error, tree)
        violations.setdefault(path, violation_of(error, path, tree))
    doubtful: list[paths.Path] = []
    while errors:
        path = _tree_path(errors[0], tree)
        if guess := near_option(errors[0], path, tree, SURELY):
            value_at(tree, path[:-1])[path[-1]] = guess
        else:
            doubtful.append(_mend(tree, path))
        errors = _errors(tree)
    return Settings.model_validate(tree), list(violations.values()), doubtful


def _errors(tree: Tree) -> list[Any]:
    try:
        Settings.model_validate(tree)
    except ValidationError as error:
        return [each for each in error.errors(include_url=False) if not _is_echo(each)]
    return []


def _is_echo(error: Any) -> bool:
    """Pydantic also calls a list too short whose items are wrong."""
    return error["type"] == "too_short" and bool(len(error["input"]) >= error["ctx"]["min_length"])


def _tree_path(error: Any, tree: Any) -> paths.Path:
    """The path in the file for pydantic's location, which also names the branch of a union it tried."""
    path: list[paths.Key] = []
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


def _mend(tree: Tree, path: paths.Path) -> paths.Path:
    """Puts a fitting value at `path`, or at the nearest place above it that has one; says where."""
    for end in range(len(path), 0, -1):
        here = path[:end]
        node = schema.node_at(here, tree)
        if isinstance(here[-1], int):
            continue
        if node is not None and (value := schema.stand_in(node)) != value_at(tree, here):
            value_at(tree, here[:-1])[here[-1]] = paths.unshared(value)
            return here
    raise AssertionError(f"no value is known to fit {dotted(path)}")
