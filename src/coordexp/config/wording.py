"""Pydantic's errors in the words of the project: what was found, what fits there, an example."""

import difflib
import json
import re
from typing import Any

from coordexp.config import schema
from coordexp.config.paths import Path
from coordexp.config.schema import Node
from coordexp.config.violations import Violation

ALIKE = 0.75


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
    problem = f"{found} is not {_shortened(schema.describe(node))}"
    if close := near_option(error, path, tree, ALIKE):
        return Violation(path, problem, f"did you mean {path[-1]}: {close}?")
    if meant := _meant(error["input"], node):
        return Violation(path, problem, f"write {path[-1]}: {meant}")
    return Violation(path, problem, _example(path, node))


def _meant(value: Any, node: Node) -> str | None:
    """The number in quotes, or the yes or no, that was surely meant."""
    kinds = {option.get("type") for option in node.get("anyOf", [node])}
    text = str(value).lower() if isinstance(value, str | int) else ""
    if "boolean" in kinds:
        return {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}.get(text)
    bare = text.replace("_", "")
    return bare if kinds & {"integer", "number"} and isinstance(value, str) and bare.isdecimal() else None


def near_option(error: Any, path: Path, tree: Any, alike: float) -> str | None:
    """The allowed word that a wrong one was probably meant to be."""
    value, node = error["input"], schema.node_at(path, tree)
    if not isinstance(value, str) or node is None:
        return None
    return _near(value, [option for option in _options(node) if isinstance(option, str)], alike)


def near_module(error: Any, path: Path, tree: Any, alike: float) -> str | None:
    return _near(str(error["ctx"]["tag"]), schema.module_names(schema.node_at(path, tree) or {}), alike)


def shown(value: Any, path: Path) -> str:
    """As it would be written in YAML, shortened; nothing that may be a secret."""
    if path and re.search(r"(^|_)(token|secret|password|key)$", str(path[-1]).lower()):
        return "the value"
    text = json.dumps(value, ensure_ascii=False, default=str)
    begin = '"' if path and path[-1] == "base_url" else "://"
    text = re.sub(begin + r'(?:[^"\\]|\\.)*@', f"{begin}...@", text)  # the user and password of a URL
    return text if len(text) <= 60 else text[:57] + "..."


def flow(value: Any) -> str:
    """In YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    return value if isinstance(value, str) and value else json.dumps(value)


def _shortened(text: str) -> str:
    return text if len(text) < 200 else ", ".join(text.split(", ")[:8]) + ", ..."


def _near(word: str, options: list[str], alike: float) -> str | None:
    folded = {option.casefold(): option for option in options}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=alike)
    begun = [option for option in folded if len(word) > 2 and option.startswith(word.casefold())]
    return folded[(close or begun)[0]] if close or begun else None


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
