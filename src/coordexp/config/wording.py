"""Pydantic's errors in the words of the project: what was found, what fits there, an example."""

import difflib
import json
import re
from typing import Any

from coordexp.config import schema
from coordexp.config.paths import Path
from coordexp.config.schema import Node
from coordexp.config.violations import Violation

ALIKE = 0.6


def violation_of(error: Any, path: Path, tree: Any) -> Violation:
    node = schema.node_at(path, tree) or {}
    found = shown(error["input"], path)
    match error["type"]:
        case "missing":
            return Violation(path, "missing", f"{_meaning(node)}add e.g. {path[-1]}: {flow(_sample(node))}")
        case "union_tag_not_found":
            return Violation((*path, "name"), "missing", f"write one of {', '.join(schema.module_names(node))}")
        case "union_tag_invalid":
            name, known = error["ctx"]["tag"], schema.module_names(node)
            close = _near(name, known, ALIKE)
            fix = f"did you mean name: {close}?" if close else f"write one of {', '.join(known)}"
            return Violation((*path, "name"), f"{shown(name, path)} is no module", fix)
        case "value_error":
            return Violation(path, f"{found}: {error['ctx']['error']}", _example(path, node))
        case "too_short":
            return Violation(path, "is empty", _example(path, node))
    problem = f"{found} is not {schema.describe(node)}"
    if close := near_option(error, path, tree, ALIKE):
        return Violation(path, problem, f"did you mean {path[-1]}: {close}?")
    return Violation(path, problem, _example(path, node))


def near_option(error: Any, path: Path, tree: Any, alike: float) -> str | None:
    """The allowed word that a wrong one was probably meant to be."""
    value, node = error["input"], schema.node_at(path, tree)
    if not isinstance(value, str) or node is None:
        return None
    return _near(value, [option for option in _options(node) if isinstance(option, str)], alike)


def shown(value: Any, path: Path) -> str:
    """As it would be written in YAML, shortened; nothing that may be a secret."""
    if any(word in str(key).lower() for key in path for word in ("token", "secret", "password")):
        return "the value"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def flow(value: Any) -> str:
    """In YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    return value if isinstance(value, str) and value else json.dumps(value)


def _near(word: str, options: list[str], alike: float) -> str | None:
    folded = {option.casefold(): option for option in options}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=alike)
    return folded[close[0]] if close else None


def _options(node: Node) -> list[Any]:
    node = schema.resolve(node)
    found = list(node.get("enum", [node["const"]] if "const" in node else []))
    for option in node.get("anyOf", []):
        found += _options(option)
    return found


def _sample(node: Node) -> Any:
    return node["examples"][0] if "examples" in node else schema.stand_in(node)


def _example(path: Path, node: Node) -> str:
    sample = _sample(node)
    if sample == {}:
        return f"{_meaning(node)}write a mapping of keys to values"
    key = f"{path[-1]}: " if path and isinstance(path[-1], str) else ""
    return f"{_meaning(node)}write e.g. {key}{flow(sample)}"


def _meaning(node: Node) -> str:
    """The first sentence of the description, as the first half of one."""
    text = schema.resolve(node).get("description", "") if node.get("type") != "object" else ""
    sentence = re.split(r"\.(?: |$)", text, maxsplit=1)[0]
    if not sentence:
        return ""
    is_word = not sentence[1:2].isupper()
    return (sentence[0].lower() if is_word else sentence[0]) + sentence[1:] + "; "
