"""Reads a YAML file and the files that it extends into one tree of plain values, each with its origin. The
functions on paths into such a tree are here too.

Scalars follow the YAML 1.2 core schema: `no` is text and `1e-5` is a number, the opposite of YAML 1.1. Environment
variables are not interpolated. A key that is written twice is an error.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from coordexp.errors import ConfigError, Finding, Place
from coordexp.files import is_encodable

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_VALUES = 10_000
MAX_FILES = 64
COMMAND_LINE = "command line"  # how the origin of a value that --set gives begins

Tree = dict[str, Any]
Key = str | int
KeyPath = tuple[Key, ...]


def format_path(path: KeyPath) -> str:
    """Return a path as text: ("servers", 0, "base_url") becomes `servers[0].base_url`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def parse_path(text: str) -> KeyPath:
    """Return the path that `format_path` writes as `text`."""
    parts = text.replace("[", ".[").split(".")
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in parts)


def value_at(tree: Any, path: KeyPath) -> Any:
    """Return the value at `path`, or None if the tree has no such path."""
    for key in path:
        is_item = isinstance(tree, list) and isinstance(key, int) and key < len(tree)
        if not is_item and not (isinstance(tree, dict) and key in tree):
            return None
        tree = tree[key]
    return tree


def copy_tree(tree: Any) -> Any:
    """Return a copy in which no two places share an object, so that a change at one place cannot show at another.

    `copy.deepcopy` would keep what YAML aliases share.
    """
    if isinstance(tree, dict):
        return {key: copy_tree(item) for key, item in tree.items()}
    return [copy_tree(item) for item in tree] if isinstance(tree, list) else tree


def fill(tree: Any, value: Any, path: KeyPath) -> list[KeyPath]:
    """Write `value` at `path` unless a value is there already, and return the paths that were filled.

    A mapping is merged into an existing mapping, key by key.
    """
    *parents, last = path
    for key in parents:
        if isinstance(tree, dict) and tree.get(key) is None:
            tree[key] = {}
        tree = value_at(tree, (key,))
        if not isinstance(tree, dict | list):
            return []
    present = value_at(tree, (last,))
    if isinstance(present, dict) and isinstance(value, dict):
        return [(*path[:-1], *filled) for key, item in value.items() for filled in fill(tree, item, (last, key))]
    if present is not None or not isinstance(tree, dict):
        return []
    tree[last] = value
    return [path]


@dataclass(frozen=True)
class Violation:
    """A finding while a config is loaded, when its path may still change. `origin` is where the value was
    written, if that is known."""

    path: KeyPath
    problem: str
    fix: str
    origin: Place | None = None

    def to_finding(self) -> Finding:
        places = (self.origin,) if self.origin else ()
        return Finding("error", format_path(self.path), self.problem, self.fix, places=places)


@dataclass
class Document:
    """A merged tree. `origins` has an entry for the path of every key and list item, `parts` the own tree of each
    file."""

    tree: Tree
    origins: dict[KeyPath, Place] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    parts: dict[str, Tree] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)

    def origin_of(self, path: KeyPath) -> Place | None:
        """Return where the value at `path` was written, or the nearest value around it that has an origin."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return None


def read_document(path: Path, overrides: Sequence[str] = ()) -> Document:
    """Return the file at `path` merged over the files that it extends, with the values of `--set` options.

    Later files win, mappings are merged and lists are replaced. An override is a text such as
    `training.max_steps=6`. Raise ConfigError, with the violations of all files, if one of them cannot be read.
    Violations that do not prevent reading, such as a key that is written twice, are returned in the document.
    """
    reader = _DocumentReader()
    document = reader.read(path, chain=())
    if reader.unreadable:
        violations = [*reader.unreadable, *document.violations]
        raise ConfigError([violation.to_finding() for violation in violations], str(path))
    for text in overrides:
        if violation := _override(document, text):
            document.violations.append(violation)
    return document


def _override(document: Document, text: str) -> Violation | None:
    """Replace one value of the document. Return a violation if the text or its place is wrong."""
    name, is_assignment, value = text.partition("=")
    origin = Place(f"{COMMAND_LINE} (--set {name.strip()})")
    path = parse_path(name.strip()) if _SETTING.fullmatch(name.strip()) else ()
    if not is_assignment or not path or not value.strip():
        fix = "write KEY=VALUE, e.g. --set training.max_steps=6; null removes a value"
        return Violation(path, "not a setting with a value", fix, origin)
    try:
        node = yaml.compose(value, Loader=_CoreSchemaLoader)
    except yaml.YAMLError:
        return Violation(path, "the value is not YAML", "quote it, e.g. --set 'custom.prompt=\"a: b\"'", origin)
    builder = _TreeBuilder(origin.file, overlay := Document(tree={}))
    new = builder.value(node, path)
    problem = next((violation.problem for violation in overlay.violations), "")
    problem = problem or ("too many values" if builder.too_large_at else _assign(document.tree, path, new))
    if problem:
        return Violation(path, problem, "correct the option", origin)
    for stale in _paths_below(document.origins, path):
        del document.origins[stale]
    document.origins |= dict.fromkeys((path, *overlay.origins), origin)
    return None


def _assign(tree: Any, path: KeyPath, value: Any) -> str:
    """Write a value at a path, with the sections above it. Return what is wrong if there can be no such path."""
    for end, key in enumerate(path, start=1):
        if isinstance(key, int):
            if not isinstance(tree, list) or key >= len(tree):
                count = len(tree) if isinstance(tree, list) else 0
                return f"{format_path(path[: end - 1])} has {count} items, so there is no [{key}]"
        elif not isinstance(tree, dict):
            return f"{format_path(path[: end - 1])} is not a section"
        if end == len(path):
            tree[key] = value
            return ""
        if isinstance(tree, dict) and tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
    return ""


class _DocumentReader:
    """Reads each file once, however often it is extended."""

    def __init__(self) -> None:
        self.unreadable: list[Violation] = []
        self._done: dict[Path, Document] = {}

    def read(self, path: Path, chain: tuple[Path, ...]) -> Document:
        where = path.resolve()
        if where in self._done:
            return self._done[where]
        if len(self._done) >= MAX_FILES:
            return self._refuse((), f"more than {MAX_FILES} files", "extend fewer files")
        own = self._parse(path)
        merged = Document(tree={})
        for entry in self._bases(own):
            problem, fix = _base_problem(path, entry, (*chain, where))
            if problem:
                self._refuse(("extends",), problem, fix, Place(_display_path(path)))
            else:
                _merge(merged, self.read(path.parent / entry, (*chain, where)))
        _merge(merged, own)
        self._done[where] = merged
        return merged

    def _refuse(self, path: KeyPath, problem: str, fix: str, origin: Place | None = None) -> Document:
        self.unreadable.append(Violation(path, problem, fix, origin))
        return Document(tree={})

    def _bases(self, document: Document) -> list[str]:
        value = document.tree.pop("extends", [])
        origin = document.origins.pop(("extends",), None)
        entries = [value] if isinstance(value, str) else value
        if isinstance(entries, list) and all(isinstance(entry, str) for entry in entries):
            return entries
        fix = "write a path or a list of paths, relative to this file, e.g. extends: [../base.yaml]"
        self._refuse(("extends",), f"{value!r} is not a list of paths", fix, origin)
        return []

    def _parse(self, path: Path) -> Document:
        name = _display_path(path)
        if not path.is_file():
            problem = f"{name} is a folder" if path.is_dir() else f"{name}: no such file"
            return self._refuse((), problem, "give the path of a YAML file")
        if path.stat().st_size > MAX_BYTES:
            problem = f"{name} has {path.stat().st_size:,} bytes; a config has at most {MAX_BYTES:,}"
            return self._refuse((), problem, "give the path of a config")
        try:
            node = yaml.compose(path.read_text(encoding="utf-8"), Loader=_CoreSchemaLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
            tab = "\\t" in str(error.problem)
            fix = "indent with spaces" if tab else "correct the YAML there"
            return self._refuse((), f"{place} cannot be read: {error.problem or error.context}", fix)
        except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
            return self._refuse((), f"{name} cannot be read: {error}", "correct the file")
        except RecursionError:
            return self._refuse((), f"{name} is nested too deeply", f"use at most {MAX_DEPTH} levels")
        document = Document(tree={}, files=[name])
        if node is None:
            return document
        if not isinstance(node, yaml.MappingNode) or node.tag != f"{_TAG}map":
            return self._refuse((), f"{name} is not a mapping of keys to values", "write e.g. model: ...")
        builder = _TreeBuilder(name, document)
        document.tree = document.parts[name] = builder.mapping(node, ())
        if builder.too_large_at is not None:
            problem = f"{name} has more than {MAX_VALUES:,} values or {MAX_DEPTH} levels"
            return self._refuse(builder.too_large_at, problem, "do not nest aliases")
        return document


def _base_problem(path: Path, entry: str, chain: tuple[Path, ...]) -> tuple[str, str]:
    """Return the problem and the fix of a file that cannot be extended, or two empty texts."""
    if Path(entry).is_absolute():
        return f"{entry} is absolute", "write a path relative to this file, so that configs can be moved"
    base = path.parent / entry
    if not os.path.isfile(base):  # noqa: PTH113 - Path.is_file raises OSError for names that are too long
        problem = f"{entry[:200]} is not a file"
        return problem, f"correct the path; it is relative to {_display_path(path.parent)}"
    where = base.resolve()
    if where in chain:
        loop = " -> ".join(_display_path(file) for file in (*chain[chain.index(where) :], where))
        return f"the files form a cycle: {loop}", "remove one of the links"
    return "", ""


_TAG = "tag:yaml.org,2002:"
_SETTING = re.compile(r"\w+(\[\d+\])*(\.\w+(\[\d+\])*)*")


class _CoreSchemaLoader(yaml.SafeLoader):
    """A safe loader with the implicit types of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


_SCALARS = {
    "null": (re.compile(r"^(?:~|null|Null|NULL|)$"), [*"~nN", ""]),
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"]),
    "int": (re.compile(r"^[-+]?[0-9]{1,18}$|^0o[0-7]{1,20}$|^0x[0-9a-fA-F]{1,15}$"), [*"-+0123456789"]),
    "float": (
        re.compile(
            r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"
            r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
        ),
        [*"-+.0123456789"],
    ),
}
for _kind, (_pattern, _first) in _SCALARS.items():
    _CoreSchemaLoader.add_implicit_resolver(_TAG + _kind, _pattern, _first)


class _TreeBuilder:
    """Turns composed nodes into values and records where each was written.

    `too_large_at` is the path at which the file exceeded a limit. From there on, nothing more is read.
    """

    def __init__(self, file: str, document: Document) -> None:
        self._file = file
        self._document = document
        self._values = 0
        self.too_large_at: KeyPath | None = None

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> Tree:
        result: Tree = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or not is_encodable(key_node.value):
                self._report(path, "has a key that is not plain text", "use plain text for keys", key_node)
                continue
            key = key_node.value
            here = (*path, key)
            if key == "<<":
                self._report(
                    here, "merge keys are not part of YAML 1.2", "use extends, or repeat the values", key_node
                )
                continue
            if key in result:
                problem = f"written twice, first at {self._document.origins[here]}"
                self._report(here, problem, "keep one of the two", key_node)
            self._document.origins[here] = self._origin(key_node)
            result[key] = self.value(value_node, here)
        return result

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._values += 1
        if self.too_large_at is None and (self._values > MAX_VALUES or len(path) > MAX_DEPTH):
            self.too_large_at = path
        if self.too_large_at is not None:
            return None
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self._item(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        return self._report(path, f"has the YAML tag {node.tag}", "write a plain value", node)

    def _item(self, node: yaml.Node, path: KeyPath) -> Any:
        self._document.origins[path] = self._origin(node)
        return self.value(node, path)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        if kind == "str":
            if not is_encodable(text):
                return self._report(
                    path, "has half a character (a lone surrogate)", "write the whole character", node
                )
            return text
        if kind not in _SCALARS or not _SCALARS[kind][0].match(text):
            return self._report(path, f"{text[:40]!r} has the YAML tag {node.tag}", "write a plain value", node)
        match kind:
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))

    def _report(self, path: KeyPath, problem: str, fix: str, node: yaml.Node) -> None:
        self._document.violations.append(Violation(path, problem, fix, self._origin(node)))

    def _origin(self, node: yaml.Node) -> Place:
        return Place(self._file, node.start_mark.line + 1)


def _merge(base: Document, overlay: Document) -> None:
    """Change `base` so that the values of `overlay` win. Mappings are merged, and lists are replaced."""
    base.parts |= overlay.parts
    base.files += [name for name in overlay.files if name not in base.files]
    base.violations += [violation for violation in overlay.violations if violation not in base.violations]
    _merge_trees(base, overlay, base.tree, overlay.tree, ())


def _merge_trees(base: Document, overlay: Document, old: Tree, new: Tree, path: KeyPath) -> None:
    """Merge `new`, the part of `overlay` at `path`, into `old`, the part of `base` there."""
    for key, value in new.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(old.get(key), dict):
            _merge_trees(base, overlay, old[key], value, here)
        else:
            for stale in _paths_below(base.origins, here) if isinstance(old.get(key), dict | list) else ():
                del base.origins[stale]
            old[key] = copy_tree(value)
            if isinstance(value, dict | list):
                inner = _paths_below(overlay.origins, here)
                base.origins |= {inner_path: overlay.origins[inner_path] for inner_path in inner}
        base.origins[here] = overlay.origins[here]


def _paths_below(origins: dict[KeyPath, Place], path: KeyPath) -> list[KeyPath]:
    return [inner for inner in origins if inner[: len(path)] == path]


def _display_path(path: Path) -> str:
    """Return the path relative to the working directory if it is inside it, else the path itself."""
    where = path.resolve()
    return str(where.relative_to(Path.cwd())) if where.is_relative_to(Path.cwd()) else str(path)
