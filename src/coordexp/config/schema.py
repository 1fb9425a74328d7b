"""The settings classes as one JSON Schema: what is allowed at a path, in words and as an example value, and the
words for what is not allowed.

Error messages, recovery after an error, the reference page and the editor schema all read it. So a name, a default
or a description is written only once, in the settings classes.
"""

import difflib
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from coordexp.config.settings import Settings
from coordexp.config.yaml_tree import KeyPath, Violation, value_at

Node = dict[str, Any]
SIMILARITY = 0.75  # How similar two words must be for one to be suggested for the other.


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
        return flow_yaml(node["const"])
    if "enum" in node:
        return "one of " + ", ".join(map(flow_yaml, node["enum"]))
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


def explain_error(error: Any, path: KeyPath, tree: Any) -> Violation:
    """Return the violation that one of pydantic's errors means to the user."""
    node = node_at(path, tree) or {}
    value = quote_value(error["input"], path)
    match error["type"]:
        case "missing":
            return Violation(path, "missing", f"{_meaning(node)}add e.g. {path[-1]}: {flow_yaml(_sample(node))}")
        case "union_tag_not_found":
            return Violation((*path, "name"), "missing", f"write one of {', '.join(module_names(node))}")
        case "union_tag_invalid":
            name, known = error["ctx"]["tag"], module_names(node)
            close = _closest(name, known, SIMILARITY)
            fix = f"did you mean name: {close}?" if close else f"write one of {', '.join(known)}"
            return Violation((*path, "name"), f"{quote_value(name, path)} is not a module", fix)
        case "value_error":
            return Violation(path, f"{value}: {error['ctx']['error']}", _example(path, node))
        case "too_short":
            return Violation(path, "is empty", _example(path, node))
    problem = f"{value} is not {_shorten(describe(node))}"
    if close := closest_option(error, path, tree, SIMILARITY):
        return Violation(path, problem, f"did you mean {path[-1]}: {close}?")
    if guess := _guess_value(error["input"], node):
        return Violation(path, problem, f"write {path[-1]}: {guess}")
    return Violation(path, problem, _example(path, node))


def _guess_value(value: Any, node: Node) -> str | None:
    """Return the number for a number in quotes, true or false for words such as yes and no, else None."""
    kinds = {option.get("type") for option in node.get("anyOf", [node])}
    text = str(value).lower() if isinstance(value, str | int) else ""
    if "boolean" in kinds:
        return {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}.get(text)
    bare = text.replace("_", "")
    return bare if kinds & {"integer", "number"} and isinstance(value, str) and bare.isdecimal() else None


def closest_option(error: Any, path: KeyPath, tree: Any, similarity: float) -> str | None:
    """Return the allowed word that is most similar to the wrong one, or None if none is similar enough."""
    value, node = error["input"], node_at(path, tree)
    if not isinstance(value, str) or node is None:
        return None
    return _closest(value, [option for option in _options(node) if isinstance(option, str)], similarity)


def closest_module(error: Any, path: KeyPath, tree: Any, similarity: float) -> str | None:
    """Return the module whose name is most similar to the wrong one, or None if none is similar enough."""
    return _closest(str(error["ctx"]["tag"]), module_names(node_at(path, tree) or {}), similarity)


def quote_value(value: Any, path: KeyPath) -> str:
    """Return the value as it would be written in YAML, shortened and without anything that may be a secret."""
    if path and re.search(r"(^|_)(token|secret|password|key)$", str(path[-1]).lower()):
        return "the value"
    text = json.dumps(value, ensure_ascii=False, default=str)
    begin = '"' if path and path[-1] == "base_url" else "://"
    text = re.sub(begin + r'(?:[^"\\]|\\.)*@', f"{begin}...@", text)  # the user and password of a URL
    return text if len(text) <= 60 else text[:57] + "..."


def flow_yaml(value: Any) -> str:
    """Return the value in YAML's flow style, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow_yaml, value)) + "]"
    return value if isinstance(value, str) and value else json.dumps(value)


def _shorten(text: str) -> str:
    return text if len(text) < 200 else ", ".join(text.split(", ")[:8]) + ", ..."


def _closest(word: str, options: list[str], similarity: float) -> str | None:
    folded = {option.casefold(): option for option in options}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=similarity)
    begun = [option for option in folded if len(word) > 2 and option.startswith(word.casefold())]
    return folded[(close or begun)[0]] if close or begun else None


def _options(node: Node) -> list[Any]:
    node = resolve(node)
    options = list(node.get("enum", [node["const"]] if "const" in node else []))
    for alternative in node.get("anyOf", []):
        options += _options(alternative)
    return options


def _sample(node: Node) -> Any:
    return node["examples"][0] if "examples" in node else valid_value(node)


def _example(path: KeyPath, node: Node) -> str:
    sample = _sample(node)
    if sample == {}:
        return f"{_meaning(node)}write a mapping of keys to values"
    key = f"{path[-1]}: " if path and isinstance(path[-1], str) else ""
    return f"{_meaning(node)}write e.g. {key}{flow_yaml(sample)}"


def _meaning(node: Node) -> str:
    """Return the first sentence of the description, to be continued by what to write."""
    text = resolve(node).get("description", "") if node.get("type") != "object" else ""
    sentence = re.split(r"\.(?: |$)", text, maxsplit=1)[0]
    if not sentence:
        return ""
    is_word = not sentence[1:2].isupper()
    return (sentence[0].lower() if is_word else sentence[0]) + sentence[1:] + "; "
