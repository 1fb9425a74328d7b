"""The settings classes seen as one JSON Schema: what may stand at a path, in words and by example.

Error messages, recovery after an error, the reference page and the editor schema all read it, so that a
name, a default or a description is written once, in the settings classes.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from coordexp.config.paths import Path, value_at
from coordexp.config.settings import Settings

Node = dict[str, Any]


@cache
def root() -> Node:
    return Settings.model_json_schema()


def node_at(path: Path, tree: Any) -> Node | None:
    """The schema of the value at `path`; `tree` tells which kind of module a list entry is."""
    node: Node | None = root()
    for depth, key in enumerate(path):
        if node is None:
            return None
        node = _concrete(node, value_at(tree, path[:depth]))
        node = node.get("items") if isinstance(key, int) else node.get("properties", {}).get(key)
    return node


def names_at(path: Path, tree: Any) -> list[str]:
    """The keys allowed in the mapping at `path`."""
    node = node_at(path, tree)
    return list(_concrete(node, value_at(tree, path)).get("properties", {})) if node else []


def leaves() -> Iterator[tuple[Path, Node]]:
    """Every setting outside of lists, with its schema, in the order of the classes."""
    yield from ((path, node) for path, node, is_section in _walk((), root()) if not is_section)


@cache
def places() -> tuple[Path, ...]:
    """The paths of all settings and sections outside of lists."""
    return tuple(path for path, _, _ in _walk((), root()))


def describe(node: Node) -> str:
    """In words: `an integer >= 1`, `one of vllm, hf`, `text or null`."""
    if "$ref" in node:
        return describe(resolve(node))
    if "const" in node:
        return _yaml(node["const"])
    if "enum" in node:
        return "one of " + ", ".join(map(_yaml, node["enum"]))
    if "anyOf" in node:
        return " or ".join(describe(option) for option in node["anyOf"])
    if "oneOf" in node:
        return "a mapping whose name is one of " + ", ".join(module_names(node))
    match node.get("type"):
        case "boolean":
            return "true or false"
        case "integer":
            return "an integer" + _bounds(node)
        case "number":
            return "a number" + _bounds(node)
        case "string":
            return "text"
        case "null":
            return "null"
        case "array":
            return "a list of " + {"text": "texts", "a mapping": "mappings"}.get(
                describe(node["items"]), describe(node["items"])
            )
    return "a mapping"


def module_names(node: Node) -> list[str]:
    """The modules that may stand where `node` is the choice among them."""
    return [resolve(option)["properties"]["name"]["const"] for option in node["oneOf"]]


def stand_in(node: Node) -> Any:
    """A value that fits: the default, else an example. Used to go on checking after an error."""
    if "default" in node:
        return node["default"]
    if "examples" in node:
        return node["examples"][0]
    node = resolve(node)
    if "oneOf" in node:
        node = resolve(node["oneOf"][0])
    if "const" in node or "enum" in node:
        return node.get("const", node.get("enum", [None])[0])
    if node.get("type") == "array":
        return [stand_in(node["items"])] if node.get("minItems") else []
    return {key: stand_in(node["properties"][key]) for key in node.get("required", ())}


def resolve(node: Node) -> Node:
    while "$ref" in node:
        rest = {key: value for key, value in node.items() if key != "$ref"}
        node = {**root()["$defs"][node["$ref"].rpartition("/")[2]], **rest}
    return node


def _walk(path: Path, node: Node) -> Iterator[tuple[Path, Node, bool]]:
    for key, child in node["properties"].items():
        inner = _concrete(child, None)
        is_section = "properties" in inner
        yield (*path, key), child, is_section
        if is_section:
            yield from _walk((*path, key), inner)


def _concrete(node: Node, value: Any) -> Node:
    """Through references, `X or null`, and the choice of a module by its name."""
    node = resolve(node)
    if "oneOf" in node:
        name = value.get("name") if isinstance(value, dict) else None
        target = node["discriminator"]["mapping"].get(name) if isinstance(name, str) else None
        return resolve({"$ref": target}) if target else {}
    if "anyOf" in node:
        options = [option for option in node["anyOf"] if option.get("type") != "null"]
        if len(options) == 1:
            return _concrete(options[0], value)
    return node


def _bounds(node: Node) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    found = [f"{sign} {node[key]:g}" for key, sign in signs.items() if key in node]
    return " " + " and ".join(found) if found else ""


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
