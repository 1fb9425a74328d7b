"""Turns pydantic's errors into violations that show the wrong value, say what is allowed and give an example."""

import difflib
import json
import re
from typing import Any

from coordexp.config import schema
from coordexp.config.paths import KeyPath
from coordexp.config.schema import Node
from coordexp.config.violations import Violation

SIMILARITY = 0.75  # How similar two words must be for one to be suggested for the other.


def explain_error(error: Any, path: KeyPath, tree: Any) -> Violation:
    """Return the violation that one of pydantic's errors means to the user."""
    node = schema.node_at(path, tree) or {}
    value = quote_value(error["input"], path)
    match error["type"]:
        case "missing":
            return Violation(path, "missing", f"{_meaning(node)}add e.g. {path[-1]}: {flow_yaml(_sample(node))}")
        case "union_tag_not_found":
            return Violation((*path, "name"), "missing", f"write one of {', '.join(schema.module_names(node))}")
        case "union_tag_invalid":
            name, known = error["ctx"]["tag"], schema.module_names(node)
            close = _closest(name, known, SIMILARITY)
            fix = f"did you mean name: {close}?" if close else f"write one of {', '.join(known)}"
            return Violation((*path, "name"), f"{quote_value(name, path)} is not a module", fix)
        case "value_error":
            return Violation(path, f"{value}: {error['ctx']['error']}", _example(path, node))
        case "too_short":
            return Violation(path, "is empty", _example(path, node))
    problem = f"{value} is not {_shorten(schema.describe(node))}"
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
    value, node = error["input"], schema.node_at(path, tree)
    if not isinstance(value, str) or node is None:
        return None
    return _closest(value, [option for option in _options(node) if isinstance(option, str)], similarity)


def closest_module(error: Any, path: KeyPath, tree: Any, similarity: float) -> str | None:
    """Return the module whose name is most similar to the wrong one, or None if none is similar enough."""
    return _closest(str(error["ctx"]["tag"]), schema.module_names(schema.node_at(path, tree) or {}), similarity)


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
    node = schema.resolve(node)
    options = list(node.get("enum", [node["const"]] if "const" in node else []))
    for alternative in node.get("anyOf", []):
        options += _options(alternative)
    return options


def _sample(node: Node) -> Any:
    return node["examples"][0] if "examples" in node else schema.valid_value(node)


def _example(path: KeyPath, node: Node) -> str:
    sample = _sample(node)
    if sample == {}:
        return f"{_meaning(node)}write a mapping of keys to values"
    key = f"{path[-1]}: " if path and isinstance(path[-1], str) else ""
    return f"{_meaning(node)}write e.g. {key}{flow_yaml(sample)}"


def _meaning(node: Node) -> str:
    """Return the first sentence of the description, to be continued by what to write."""
    text = schema.resolve(node).get("description", "") if node.get("type") != "object" else ""
    sentence = re.split(r"\.(?: |$)", text, maxsplit=1)[0]
    if not sentence:
        return ""
    is_word = not sentence[1:2].isupper()
    return (sentence[0].lower() if is_word else sentence[0]) + sentence[1:] + "; "
