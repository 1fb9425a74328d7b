"""Pydantic's errors in the words of the project: what was found, what fits there, an example."""

import difflib
import json
from typing import Any

from coordexp.config import schema
from coordexp.config.schema import Node
from coordexp.config.violations import Key, Violation


def violation_of(error: Any, path: tuple[Key, ...], tree: Any) -> Violation:
    node = schema.node_at(path, tree) or {}
    found = shown(error["input"])
    match error["type"]:
        case "missing" | "union_tag_not_found":
            if error["type"] == "union_tag_not_found":
                path = (*path, "name")
            return Violation(path, "missing", _add(path, node))
        case "union_tag_invalid":
            name, known = error["ctx"]["tag"], schema.module_names(node)
            near = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean name: {near[0]}?" if near else f"write one of {', '.join(known)}"
            return Violation((*path, "name"), f"{shown(name)} is no module", fix)
        case "value_error":
            return Violation(path, f"{found}: {error['ctx']['error']}", _example(path, node))
        case "too_short":
            return Violation(path, "is empty", _example(path, node))
    problem = f"{found} is not {schema.describe(node)}"
    if close := close_option(error, path, tree):
        return Violation(path, problem, f"did you mean {path[-1]}: {close}?")
    return Violation(path, problem, _example(path, node))


def close_option(error: Any, path: tuple[Key, ...], tree: Any) -> str | None:
    """The allowed word that a wrong one was probably meant to be."""
    value, node = error["input"], schema.node_at(path, tree)
    if not isinstance(value, str) or node is None:
        return None
    options = [option for option in _options(node) if isinstance(option, str)]
    return next(iter(difflib.get_close_matches(value, options, n=1)), None)


def shown(value: Any) -> str:
    """As it would be written in YAML, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _add(path: tuple[Key, ...], node: Node) -> str:
    return f"{_meaning(node)}add e.g. {path[-1]}: {_flow(schema.stand_in(node))}"


def _example(path: tuple[Key, ...], node: Node) -> str:
    sample = node["examples"][0] if "examples" in node else schema.stand_in(node)
    key = f"{path[-1]}: " if isinstance(path[-1], str) else ""
    return f"{_meaning(node)}write e.g. {key}{_flow(sample)}"


def _options(node: Node) -> list[Any]:
    node = schema.resolve(node)
    found = list(node.get("enum", [node["const"]] if "const" in node else []))
    for option in node.get("anyOf", []):
        found += _options(option)
    return found


def _meaning(node: Node) -> str:
    """The first sentence of the description, as the first half of one."""
    sentence = schema.resolve(node).get("description", "").partition(". ")[0].rstrip(".")
    return sentence[:1].lower() + sentence[1:] + "; " if sentence else ""


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        return value
    return json.dumps(value)
