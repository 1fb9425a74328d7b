"""Reads a YAML file and the files it extends into one tree of plain values, each with its origin.

Scalars follow the YAML 1.2 core schema: `no` is a word and `1e-5` is a number, which YAML 1.1 has the
other way round. Environment variables are not interpolated. A key written twice is an error.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from coordexp.config import paths
from coordexp.config.violations import ConfigError, Violation
from coordexp.text import encodable

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_VALUES = 10_000
MAX_FILES = 64

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
    origins: dict[paths.Path, Origin] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)

    def origin_of(self, path: paths.Path) -> Origin | None:
        """Where the value at `path`, or the nearest thing around it, was written."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return None


def read_document(path: Path) -> Document:
    """The file at `path` over the files it extends: later ones win, mappings merge, lists are replaced.

    Raises when a file cannot be read, with all that is wrong in any of them; what is wrong and does not stop the
    reading (a key written twice) is in the document's `violations`.
    """
    reading = _Reading()
    document = reading.read(path, chain=())
    if reading.unreadable:
        raise ConfigError([*reading.unreadable, *document.violations], str(path))
    return document


class _Reading:
    """One load: each file is read once, however often it is extended."""

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
            base = path.parent / entry
            problem, fix = _base_problem(entry, base, (*chain, where))
            if problem:
                self._refuse(("extends",), problem, fix, _shown(path))
            else:
                _merge(merged, self.read(base, (*chain, where)))
        _merge(merged, own)
        self._done[where] = merged
        return merged

    def _refuse(self, path: paths.Path, problem: str, fix: str, origin: str | None = None) -> Document:
        self.unreadable.append(Violation(path, problem, fix, origin))
        return Document(tree={})

    def _bases(self, document: Document) -> list[str]:
        value = document.tree.pop("extends", [])
        origin = document.origins.pop(("extends",), None)
        entries = [value] if isinstance(value, str) else value
        if isinstance(entries, list) and all(isinstance(entry, str) for entry in entries):
            return entries
        fix = "write a path or a list of paths, relative to this file, e.g. extends: [../base.yaml]"
        self._refuse(("extends",), f"{value!r} is not a list of paths", fix, str(origin))
        return []

    def _parse(self, path: Path) -> Document:
        name = _shown(path)
        if not path.is_file():
            problem = f"{name} is a folder" if path.is_dir() else f"{name}: no such file"
            return self._refuse((), problem, "give the path of a YAML file")
        if path.stat().st_size > MAX_BYTES:
            problem = f"{name} has {path.stat().st_size:,} bytes; a config has at most {MAX_BYTES:,}"
            return self._refuse((), problem, "is this the right file?")
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
        try:
            document.tree = _Builder(name, document).mapping(node, ())
        except _TooLarge as error:
            return self._refuse(error.path, str(error), "do not nest aliases")
        return document


def _base_problem(entry: str, base: Path, chain: tuple[Path, ...]) -> tuple[str, str]:
    if Path(entry).is_absolute():
        return f"{entry} is absolute", "write a path relative to this file, so that configs can be moved"
    try:
        is_file, where = base.is_file(), base.resolve()
    except OSError as error:
        return f"{entry[:60]}: {error.strerror}", "correct the path"
    if not is_file:
        return f"{entry} is not a file", f"it is looked for in {_shown(base.parent)}; correct the path"
    if where in chain:
        loop = " -> ".join(_shown(file) for file in (*chain[chain.index(where) :], where))
        return f"the files form a cycle: {loop}", "remove one of the links"
    return "", ""


_TAG = "tag:yaml.org,2002:"


class _CoreSchemaLoader(yaml.SafeLoader):
    """Safe, with the implicit types of YAML 1.2."""

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


class _TooLarge(Exception):
    def __init__(self, path: paths.Path, file: str) -> None:
        super().__init__(f"{file} has more than {MAX_VALUES:,} values or {MAX_DEPTH} levels")
        self.path = path


class _Builder:
    """Turns composed nodes into values and notes where each was written."""

    def __init__(self, file: str, document: Document) -> None:
        self._file = file
        self._document = document
        self._values = 0

    def mapping(self, node: yaml.MappingNode, path: paths.Path) -> Tree:
        result: Tree = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or not encodable(key_node.value):
                self._complain(path, "has a key that is not plain text", "write plain keys", key_node)
                continue
            key = key_node.value
            here = (*path, key)
            if key == "<<":
                self._complain(here, "merge keys are not part of YAML 1.2", "use extends, or repeat", key_node)
                continue
            if key in result:
                problem = f"written twice, first at {self._document.origins[here]}"
                self._complain(here, problem, "keep one of the two", key_node)
            self._document.origins[here] = self._origin(key_node)
            result[key] = self._value(value_node, here)
        return result

    def _value(self, node: yaml.Node, path: paths.Path) -> Any:
        self._values += 1
        if self._values > MAX_VALUES or len(path) > MAX_DEPTH:
            raise _TooLarge(path, self._file)
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self._item(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        return self._complain(path, f"has the YAML tag {node.tag}", "write a plain value", node)

    def _item(self, node: yaml.Node, path: paths.Path) -> Any:
        self._document.origins[path] = self._origin(node)
        return self._value(node, path)

    def _scalar(self, node: yaml.ScalarNode, path: paths.Path) -> Any:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        if kind == "str":
            if not encodable(text):
                return self._complain(path, "holds half a character (a lone surrogate)", "write it whole", node)
            return text
        if kind not in _SCALARS or not _SCALARS[kind][0].match(text):
            return self._complain(path, f"{text[:40]!r} has the YAML tag {node.tag}", "write a plain value", node)
        match kind:
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))

    def _complain(self, path: paths.Path, problem: str, fix: str, node: yaml.Node) -> None:
        self._document.violations.append(Violation(path, problem, fix, str(self._origin(node))))

    def _origin(self, node: yaml.Node) -> Origin:
        return Origin(self._file, node.start_mark.line + 1)


def _merge(onto: Document, over: Document) -> None:
    onto.files += [name for name in over.files if name not in onto.files]
    onto.violations += [violation for violation in over.violations if violation not in onto.violations]
    _merge_trees(onto, over, onto.tree, over.tree, ())


def _merge_trees(onto: Document, over: Document, left: Tree, right: Tree, path: paths.Path) -> None:
    for key, value in right.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(left.get(key), dict):
            _merge_trees(onto, over, left[key], value, here)
        else:
            for stale in _inside(onto.origins, here) if isinstance(left.get(key), dict | list) else ():
                del onto.origins[stale]
            left[key] = paths.unshared(value)
            if isinstance(value, dict | list):
                onto.origins |= {inner: over.origins[inner] for inner in _inside(over.origins, here)}
        onto.origins[here] = over.origins[here]


def _inside(origins: dict[paths.Path, Origin], path: paths.Path) -> list[paths.Path]:
    return [inner for inner in origins if inner[: len(path)] == path]


def _shown(path: Path) -> str:
    """Relative to the working folder where that is shorter."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
