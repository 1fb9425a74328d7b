"""The settings classes as one JSON Schema: what is allowed at a path, in words and as an example value.

Error messages, recovery after an error, the reference page and the editor schema all read it. So a name, a default
or a description is written only once, in the settings classes.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from coordexp.config.paths import KeyPath, value_at
from coordexp.config.settings import Settings

Node = dict[str, Any]


@cache
def root() -> Node:
    return Settings.model_json_schema()


def node_at(path: KeyPath, tree: Any) -> Node | None:
    """Return the schema of the value at `path`, or None. `tree` tells which kind of module a list entry is."""
    node: Node | None = root()
    for depth, key in enumerate(path):
        if node is None:
            return None
        node = _concrete(node, value_at(tree, path[:depth]))
        node = node.get("items") if isinstance(key, int) else node.get("properties", {}).get(key)
    return node


def names_at(path: KeyPath, tree: Any) -> list[str]:
    """Return the keys that are allowed in the mapping at `path`."""
    node = node_at(path, tree)
    return list(_concrete(node, value_at(tree, path)).get("properties", {})) if node else []


def leaves() -> Iterator[tuple[KeyPath, Node]]:
    """Yield the path and the schema of every setting that is not inside a list, in the order of the classes."""
    yield from ((path, node) for path, node, is_section in _walk((), root()) if not is_section)


@cache
def all_paths() -> tuple[KeyPath, ...]:
    """Return the paths of all settings and sections that are not inside a list."""
    return tuple(path for path, _, _ in _walk((), root()))


def describe(node: Node) -> str:
    """Return the type of a value in words: `an integer >= 1`, `one of vllm, hf`, `text or null`."""
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
    """Return the names of the modules that a list entry with the schema `node` may have."""
    return [resolve(option)["properties"]["name"]["const"] for option in node["oneOf"]]


def valid_value(node: Node) -> Any:
    """Return a value that the schema accepts: the default if there is one, else an example."""
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
        return [valid_value(node["items"])] if node.get("minItems") else []
    return {key: valid_value(node["properties"][key]) for key in node.get("required", ())}


def resolve(node: Node) -> Node:
    """Return the definition that a `$ref` points to, or the node itself if it is not a reference."""
    while "$ref" in node:
        rest = {key: value for key, value in node.items() if key != "$ref"}
        node = {**root()["$defs"][node["$ref"].rpartition("/")[2]], **rest}
    return node


def _walk(path: KeyPath, node: Node) -> Iterator[tuple[KeyPath, Node, bool]]:
    for key, child in node["properties"].items():
        inner = _concrete(child, None)
        is_section = "properties" in inner
        yield (*path, key), child, is_section
        if is_section:
            yield from _walk((*path, key), inner)


def _concrete(node: Node, value: Any) -> Node:
    """Return the schema behind references, behind `X or null`, and of the module that `value` names."""
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
    bounds = [f"{sign} {node[key]:g}" for key, sign in signs.items() if key in node]
    return " " + " and ".join(bounds) if bounds else ""


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
