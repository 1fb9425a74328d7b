"""Reads a YAML file and the files that it extends into one tree of plain values, and the place of each value. The
functions on paths into such a tree are here too.

Scalars follow the YAML 1.2 core schema: `no` is text and `1e-5` is a number, the opposite of YAML 1.1. Environment
variables are not interpolated. A key that is written twice is an error.
"""

import os
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from coordexp.errors import ConfigError, Finding, Place
from coordexp.files import is_encodable

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_VALUES = 10_000
MAX_FILES = 64
COMMAND_LINE = "command line"  # how the place of a value that --set gives begins

Tree = dict[str, Any]
Key = str | int
KeyPath = tuple[Key, ...]
Error = partial(Finding, "error")


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


def exists(tree: Any, path: KeyPath) -> bool:
    for key in path:
        is_item = isinstance(tree, list) and isinstance(key, int) and key < len(tree)
        if not is_item and not (isinstance(tree, dict) and key in tree):
            return False
        tree = tree[key]
    return True


@dataclass
class Document:
    """A tree. `places` has the place of every key and list item, `parts` the own tree of each file, and `findings`
    what is wrong with the text of the files and of the options."""

    tree: Tree
    places: dict[KeyPath, Place] = field(default_factory=dict)
    parts: dict[str, Tree] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def add(self, tree: Tree, places: dict[KeyPath, Place]) -> None:
        """Put the values of another tree over these. Mappings are merged, lists are replaced."""
        self.tree = _merge(self.tree, tree)
        places = self.places | places
        self.places = {path: places[path] for path in places if exists(self.tree, path)}

    def locate(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return the findings with the places of their settings, or of the nearest sections around them, sorted by
        file and line. Those without a place come last."""
        located, places = [], {format_path(path): place for path, place in self.places.items()}
        for finding in findings:
            around = finding.subject
            while around and around not in places:
                around = around[: max(around.rfind("."), around.rfind("["), 0)]
            located.append(replace(finding, places=finding.places or ((places[around],) if around else ())))
        return sorted(located, key=lambda f: (not f.places, [(place.file, place.line or 0) for place in f.places]))


def _merge(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: _merge(below.get(key), value) for key, value in above.items()}


def read_document(path: Path, overrides: Sequence[str] = ()) -> Document:
    """Return the file at `path` merged over the files that it extends, with the values of `--set` options.

    Later files win, mappings are merged and lists are replaced. An override is a text such as
    `training.max_steps=6`. Raise ConfigError, with what is wrong in all files, if one of them cannot be read. What
    does not prevent reading, such as a key that is written twice, is returned in the document.
    """
    reader = _Reader()
    document = reader.read(path, ())
    if reader.is_broken:
        raise ConfigError(reader.findings, str(path))
    document = Document(deepcopy(document.tree), document.places, reader.parts, reader.findings)
    for text in overrides:
        _override(document, text)
    return document


def _override(document: Document, text: str) -> None:
    """Write the value of a `--set` option into the document."""
    name, is_assignment, value = (part.strip() for part in text.partition("="))
    place, path = Place(f"{COMMAND_LINE} (--set {name})"), parse_path(name) if _SETTING.fullmatch(name) else ()
    if not is_assignment or not path or not value:
        problem = "not a setting with a value"
        fix = "write KEY=VALUE, e.g. --set training.max_steps=6; null removes a value"
    else:
        problem, fix, wrong = "", "correct the option", list[Finding]()
        builder = _Builder(place.file, wrong, place)
        try:
            if (node := yaml.compose(value, Loader=_CoreSchemaLoader)) is None:
                raise ValueError("the value is a comment; quote it")
            new = builder.build(node, path)
            if not wrong:
                _assign(document.tree, path, new)
                document.add({}, {path: place} | builder.places)
        except (yaml.YAMLError, RecursionError):
            problem, fix = "the value is not YAML", "quote it, e.g. --set 'custom.prompt=\"a: b\"'"
        except ValueError as error:
            problem = str(error)
        document.findings += wrong
    if problem:
        document.findings.append(Error(format_path(path), problem, fix, places=(place,)))


def _assign(tree: Any, path: KeyPath, value: Any) -> None:
    """Write a value at a path, with the sections above it. Raise ValueError if there can be no such path."""
    for end, key in enumerate(path, start=1):
        above = format_path(path[: end - 1])
        if isinstance(key, int) and (count := len(tree) if isinstance(tree, list) else 0) <= key:
            raise ValueError(f"{above} has {count} items, so there is no [{key}]")
        if isinstance(key, str) and not isinstance(tree, dict):
            raise ValueError(f"{above} is not a section")
        if end == len(path):
            tree[key] = value
        elif isinstance(tree, dict) and tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]


_TAG = "tag:yaml.org,2002:"
_SETTING = re.compile(r"\w+(\[\d+\])*(\.\w+(\[\d+\])*)*")


class _CoreSchemaLoader(yaml.SafeLoader):
    """A safe loader with the implicit types of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


_SCALARS = {
    "null": (r"^(?:~|null|Null|NULL|)$", [*"~nN", ""]),
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", [*"tTfF"]),
    "int": (r"^[-+]?[0-9]{1,18}$|^0o[0-7]{1,20}$|^0x[0-9a-fA-F]{1,15}$", [*"-+0123456789"]),
    "float": (
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$",
        [*"-+.0123456789"],
    ),
}
for _kind, (_pattern, _first) in _SCALARS.items():
    _CoreSchemaLoader.add_implicit_resolver(_TAG + _kind, re.compile(_pattern), _first)


class _Reader:
    """Reads each file once, however often it is extended. `is_broken` is True once a file cannot be read."""

    def __init__(self) -> None:
        self.is_broken, self.findings = False, list[Finding]()
        self.parts: dict[str, Tree] = {}
        self._done: dict[Path, Document] = {}

    def read(self, path: Path, chain: tuple[Path, ...]) -> Document:
        """Return the values of a file over those of the files that it extends. `chain` are the files that led to
        it."""
        chain = (*chain, path.resolve())
        if chain[-1] not in self._done:
            merged, (tree, places) = Document({}), self._parse(path)
            for base in self._find_bases(path, tree.pop("extends", []), places.pop(("extends",), None), chain):
                below = self.read(base, chain)
                merged.add(below.tree, below.places)
            self.parts[_display_path(path)] = tree
            merged.add(tree, places)
            self._done[chain[-1]] = merged
        return self._done[chain[-1]]

    def _refuse(self, subject: str, problem: str, fix: str, place: Place | None = None) -> None:
        self.is_broken = True
        self.findings.append(Error(subject, problem, fix, places=(place,) if place else ()))

    def _find_bases(self, path: Path, value: Any, place: Place | None, chain: tuple[Path, ...]) -> Iterator[Path]:
        """Yield the files that a file extends, and refuse the others."""
        entries = [value] if isinstance(value, str) else value
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            fix = "write a path or a list of paths, relative to this file, e.g. extends: [../base.yaml]"
            self._refuse("extends", f"{value!r} is not a list of paths", fix, place)
            return
        for entry in entries:
            base = path.parent / entry
            if Path(entry).is_absolute():
                fix = "write a path relative to this file, so that configs can be moved"
                self._refuse("extends", f"{entry} is absolute", fix, place)
            elif not os.path.isfile(base):  # noqa: PTH113 - Path.is_file raises OSError for names that are too long
                fix = f"correct the path; it is relative to {_display_path(path.parent)}"
                self._refuse("extends", f"{entry[:200]} is not a file", fix, place)
            elif (where := base.resolve()) in chain:
                loop = " -> ".join(map(_display_path, (*chain[chain.index(where) :], where)))
                self._refuse("extends", f"the files form a cycle: {loop}", "remove one of the links", place)
            elif len(chain) >= MAX_FILES:
                self._refuse("extends", f"a chain of more than {MAX_FILES} files", "extend fewer files", place)
            else:
                yield base

    def _parse(self, path: Path) -> tuple[Tree, dict[KeyPath, Place]]:
        name = _display_path(path)
        builder = _Builder(name, self.findings)
        if not path.is_file():
            problem = f"{name} is a folder" if path.is_dir() else f"{name}: no such file"
            self._refuse("", problem, "give the path of a YAML file")
        elif (size := path.stat().st_size) > MAX_BYTES:
            problem = f"{name} has {size:,} bytes; a config has at most {MAX_BYTES:,}"
            self._refuse("", problem, "give the path of a config")
        else:
            try:
                node = yaml.compose(path.read_text(encoding="utf-8"), Loader=_CoreSchemaLoader)
                tree = {} if node is None else builder.build(node, ())
                if isinstance(tree, dict):
                    return tree, builder.places
                self._refuse("", f"{name} is not a mapping of keys to values", "write e.g. model: ...")
            except yaml.MarkedYAMLError as error:
                mark = error.problem_mark or error.context_mark
                where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
                fix = "indent with spaces" if "\\t" in str(error.problem) else "correct the YAML there"
                self._refuse("", f"{where} cannot be read: {error.problem or error.context}", fix)
            except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
                reason = f"more than {MAX_DEPTH} levels" if isinstance(error, RecursionError) else error
                self._refuse("", f"{name} cannot be read: {reason}", "correct the file")
        return {}, {}


class _Builder:
    """Turns composed YAML into plain values. `places` has the places of all values below the first one; all are at
    `place`, if it is given. Adds what is wrong in the YAML to `findings`. Raises ValueError if there are too many
    values or levels."""

    def __init__(self, file: str, findings: list[Finding], place: Place | None = None) -> None:
        self.places: dict[KeyPath, Place] = {}
        self._file, self._findings, self._place, self._values = file, findings, place, 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self._values += 1
        if self._values > MAX_VALUES or len(path) > MAX_DEPTH:
            raise ValueError(f"more than {MAX_VALUES:,} values or {MAX_DEPTH} levels; do not nest aliases")
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            self.places |= {(*path, index): self._place_of(item) for index, item in enumerate(node.value)}
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        return self._report(path, f"has the YAML tag {node.tag}", "write a plain value", node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> Tree:
        result: Tree = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or not is_encodable(key):
                self._report(path, "has a key that is not plain text", "use plain text for keys", key_node)
            elif key == "<<":
                problem = "merge keys are not part of YAML 1.2"
                self._report((*path, key), problem, "use extends, or repeat the values", key_node)
            else:
                here = (*path, key)
                if key in result:
                    problem = f"written twice, first at {self.places[here]}"
                    self._report(here, problem, "keep one of the two", key_node)
                self.places[here] = self._place_of(key_node)
                result[key] = self.build(value_node, here)
        return result

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        if kind == "str" and not is_encodable(text):
            return self._report(path, "has half a character (a lone surrogate)", "write the whole one", node)
        if kind == "str":
            return text
        if kind not in _SCALARS or not re.match(_SCALARS[kind][0], text):
            return self._report(path, f"{text[:40]!r} has the YAML tag {node.tag}", "write a plain value", node)
        if kind == "int":
            return int(text, 0 if text[:2] in ("0o", "0x") else 10)
        if kind in ("null", "bool"):
            return text.lower() == "true" if kind == "bool" else None
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))

    def _report(self, path: KeyPath, problem: str, fix: str, node: yaml.Node) -> None:
        self._findings.append(Error(format_path(path), problem, fix, places=(self._place_of(node),)))

    def _place_of(self, node: yaml.Node) -> Place:
        return self._place or Place(self._file, node.start_mark.line + 1)


def _display_path(path: Path) -> str:
    """Return the path relative to the working directory if it is inside it, else the path itself."""
    where = path.resolve()
    return str(where.relative_to(Path.cwd())) if where.is_relative_to(Path.cwd()) else str(path)
