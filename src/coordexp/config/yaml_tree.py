"""Reads a YAML file and the files it extends into one tree of plain values, each with its origin.

Scalars follow the YAML 1.2 core schema: `no` is a word and `1e-5` is a number, which YAML 1.1 has the
other way round. Environment variables are not interpolated. A key written twice is an error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from coordexp.config.violations import ConfigError, Key, Violation

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_NODES = 10_000

_TAG = "tag:yaml.org,2002:"

Tree = dict[str, Any]


@dataclass(frozen=True)
class Origin:
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Document:
    """A merged tree. `origins` has an entry for every key and list item, by its path."""

    tree: Tree
    origins: dict[tuple[Key, ...], Origin] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def origin_of(self, path: tuple[Key, ...]) -> Origin | None:
        """Where the value at `path`, or the nearest thing around it, was written."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return None


def read_document(path: Path) -> Document:
    """The file at `path` over the files it extends: later ones win, mappings merge, lists are replaced."""
    return _read(path, chain=())


def _read(path: Path, chain: tuple[Path, ...]) -> Document:
    where = path.resolve()
    if where in chain:
        loop = " -> ".join(_shown(p) for p in (*chain[chain.index(where) :], where))
        raise ConfigError([Violation((), f"extends forms a cycle: {loop}", "remove one of the links")])
    own = _parse(path)
    bases = [_base_path(entry, path) for entry in _extends(own, path)]
    merged = Document(tree={})
    for base in bases:
        _merge(merged, _read(base, (*chain, where)))
    _merge(merged, own)
    return merged


def _extends(document: Document, path: Path) -> list[str]:
    value = document.tree.pop("extends", [])
    origin = document.origins.pop(("extends",), None)
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        fix = "write a path or a list of paths, relative to this file, e.g. extends: [../base.yaml]"
        raise ConfigError([Violation(("extends",), f"{value!r} is not a list of paths", fix, str(origin))])
    return entries


def _base_path(entry: str, path: Path) -> Path:
    base = path.parent / entry
    if Path(entry).is_absolute():
        problem, fix = (
            f"{entry} is absolute",
            "write a path relative to this file, so that configs can be moved",
        )
    elif not base.is_file():
        problem, fix = f"{entry} is not a file", f"it is looked for beside {_shown(path)}; correct the path"
    else:
        return base
    raise ConfigError([Violation(("extends",), problem, fix, _shown(path))])


def _parse(path: Path) -> Document:
    name = _shown(path)
    if not path.is_file():
        raise ConfigError([Violation((), f"{name}: no such file", "give the path of a YAML file")])
    if path.stat().st_size > MAX_BYTES:
        problem = f"{name} has {path.stat().st_size:,} bytes; a config has at most {MAX_BYTES:,}"
        raise ConfigError([Violation((), problem, "is this the right file?")])
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=_CoreSchemaLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([Violation((), f"{name} is not YAML: {error}", "correct the syntax")]) from error
    document = Document(tree={}, files=[name])
    if node is None:
        return document
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError([Violation((), f"{name} is not a mapping of keys to values", "write e.g. model: ...")])
    reader = _Reader(name, document)
    document.tree = reader.mapping(node, ())
    if reader.violations:
        raise ConfigError(reader.violations)
    return document


class _CoreSchemaLoader(yaml.SafeLoader):
    """Safe, with the implicit types of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _kind, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", [*"~nN", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", [*"tTfF"]),
    ("int", r"^[-+]?[0-9]+$|^0o[0-7]+$|^0x[0-9a-fA-F]+$", [*"-+0123456789"]),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", [*"-+0123456789."]),
    ("float", r"^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$", [*"-+."]),
):
    _CoreSchemaLoader.add_implicit_resolver(_TAG + _kind, re.compile(_pattern), _first)


class _Reader:
    """Turns composed nodes into values and notes where each was written."""

    def __init__(self, file: str, document: Document) -> None:
        self._file = file
        self._document = document
        self._nodes = 0
        self.violations: list[Violation] = []

    def mapping(self, node: yaml.MappingNode, path: tuple[Key, ...]) -> Tree:
        result: Tree = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else str(key_node.tag)
            here = (*path, key)
            if key in result:
                first = self._document.origins[here]
                problem = f"written twice, first at {first}"
                self._complain(here, problem, "keep one of the two", key_node)
            self._document.origins[here] = self._origin(key_node)
            result[key] = self._value(value_node, here)
        return result

    def _value(self, node: yaml.Node, path: tuple[Key, ...]) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or len(path) > MAX_DEPTH:
            problem = f"{self._file} has more than {MAX_NODES:,} values or {MAX_DEPTH} levels"
            raise ConfigError([Violation(path, problem, "do not nest aliases", str(self._origin(node)))])
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self._item(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _item(self, node: yaml.Node, path: tuple[Key, ...]) -> Any:
        self._document.origins[path] = self._origin(node)
        return self._value(node, path)

    def _scalar(self, node: yaml.Node, path: tuple[Key, ...]) -> Any:
        text = str(node.value)
        match node.tag.removeprefix(_TAG):
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
            case "float":
                return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
            case "str":
                return text
        self._complain(path, f"has the YAML tag {node.tag}", "write a plain value", node)
        return None

    def _complain(self, path: tuple[Key, ...], problem: str, fix: str, node: yaml.Node) -> None:
        self.violations.append(Violation(path, problem, fix, str(self._origin(node))))

    def _origin(self, node: yaml.Node) -> Origin:
        return Origin(self._file, node.start_mark.line + 1)


def _merge(onto: Document, over: Document) -> None:
    onto.files += [name for name in over.files if name not in onto.files]
    _merge_trees(onto, over, onto.tree, over.tree, ())


def _merge_trees(onto: Document, over: Document, left: Tree, right: Tree, path: tuple[Key, ...]) -> None:
    for key, value in right.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(left.get(key), dict):
            _merge_trees(onto, over, left[key], value, here)
        else:
            for stale in list(_below(onto.origins, here)):
                del onto.origins[stale]
            left[key] = value
            onto.origins.update({p: over.origins[p] for p in _below(over.origins, here)})
        onto.origins[here] = over.origins[here]


def _below(origins: dict[tuple[Key, ...], Origin], path: tuple[Key, ...]) -> Iterator[tuple[Key, ...]]:
    return (p for p in origins if p[: len(path)] == path)


def _shown(path: Path) -> str:
    """Relative to the working folder where that is shorter."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
