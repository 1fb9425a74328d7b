"""The settings classes seen as one JSON Schema: what may stand at a path, in words and by example.

Error messages, recovery after an error, the reference page and the editor schema all read it, so that a
name, a default or a description is written once, in the settings classes.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from coordexp.config.settings import Settings
from coordexp.config.violations import Key

Node = dict[str, Any]


@cache
def root() -> Node:
    return Settings.model_json_schema()


def node_at(path: tuple[Key, ...], tree: Any) -> Node | None:
    """The schema of the value at `path`; `tree` tells which kind of module a list entry is."""
    node: Node | None = root()
    for key in path:
        if node is None:
            return None
        node = _concrete(node, tree)
        node = node.get("items") if isinstance(key, int) else node.get("properties", {}).get(key)
        tree = _child(tree, key)
    return node


def names_at(path: tuple[Key, ...], tree: Any) -> list[str]:
    """The keys allowed in the mapping at `path`."""
    node = node_at(path, tree)
    for key in path:
        tree = _child(tree, key)
    return list(_concrete(node, tree).get("properties", {})) if node else []


def has_default(node: Node) -> bool:
    """Whether the key may be left out of its mapping: given a default here, or a section of such keys."""
    return "default" in node or not (_concrete(node, None).get("required") or "type" in node or "enum" in node)


def describe(node: Node) -> str:
    """In words: `an integer >= 1`, `one of vllm, hf`, `text or null`."""
    if "$ref" in node or "allOf" in node:
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
            return "a list of " + _plural(describe(node["items"])) if "items" in node else "a list"
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
    node = _concrete(node, None)
    if "const" in node or "enum" in node:
        return node.get("const", node.get("enum", [None])[0])
    return {key: stand_in(node["properties"][key]) for key in node.get("required", ())}


def leaves(tree: Any = None) -> Iterator[tuple[tuple[Key, ...], Node]]:
    """Every setting outside of lists, with its schema, in the order of the classes."""
    yield from _leaves((), root(), tree)


def resolve(node: Node) -> Node:
    while "$ref" in node:
        rest = {key: value for key, value in node.items() if key != "$ref"}
        node = {**root()["$defs"][node["$ref"].rpartition("/")[2]], **rest}
    return node


def _leaves(path: tuple[Key, ...], node: Node, tree: Any) -> Iterator[tuple[tuple[Key, ...], Node]]:
    for key, child in node["properties"].items():
        inner = _concrete(child, None)
        if "properties" in inner and not _is_list(inner):
            yield from _leaves((*path, key), inner, tree)
        else:
            yield (*path, key), child


def _is_list(node: Node) -> bool:
    return node.get("type") == "array"


def _concrete(node: Node, tree: Any) -> Node:
    """Through references, `X or null`, and the choice of a module by its name."""
    node = resolve(node)
    if "oneOf" in node:
        name = tree.get("name") if isinstance(tree, dict) else None
        target = node["discriminator"]["mapping"].get(name)
        return resolve({"$ref": target}) if target else {}
    if "anyOf" in node:
        options = [option for option in node["anyOf"] if option.get("type") != "null"]
        if len(options) == 1:
            return _concrete(options[0], tree)
    return node


def _child(tree: Any, key: Key) -> Any:
    if isinstance(tree, dict):
        return tree.get(str(key))
    if isinstance(tree, list) and isinstance(key, int) and key < len(tree):
        return tree[key]
    return None


def _bounds(node: Node) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    found = [f"{sign} {node[key]:g}" for key, sign in signs.items() if key in node]
    return " " + " and ".join(found) if found else ""


def _plural(text: str) -> str:
    plurals = {"text": "texts", "a mapping": "mappings"}
    return plurals.get(text, text)


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value)
