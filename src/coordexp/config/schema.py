"""The settings classes as one JSON Schema: what is allowed at a path, in words and as an example value, and the
words for what is not allowed. Error messages, the reference page and the editor schema all read it.
"""

import copy
import difflib
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from pydantic import ValidationError

from coordexp.config.legacy import ALIASES, OLD_SECTION, OLD_VARIANT, REMOVED, RENAMED
from coordexp.config.settings import Settings
from coordexp.config.training import REFUSED
from coordexp.config.yaml_tree import Error, KeyPath, Tree, exists, format_path
from coordexp.errors import Finding

Node = dict[str, Any]
SIMILARITY = 0.75  # How similar two words must be for one to be suggested for the other.
MAX_LISTED_KEYS = 25  # A message does not list the keys of a larger section.
WORDS_OF_BOOLEANS = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}


class Explanation(NamedTuple):
    """A problem of a key, and what to write instead. `new` is the key that was meant, or empty."""

    path: KeyPath
    problem: str
    fix: str
    new: KeyPath = ()


@cache
def root() -> Node:
    """Return the schema of all settings. Descriptions are on one line."""
    node: Node = json.loads(re.sub(r"\\n *", " ", json.dumps(Settings.model_json_schema())))
    return node


def node_at(path: KeyPath, tree: Any) -> Node | None:
    """Return the schema of the value at `path`, or None. `tree` tells which kind of module a list entry is."""
    return _descend(path, tree)[0]


def names_at(path: KeyPath, tree: Any) -> list[str]:
    """Return the keys that are allowed in the mapping at `path`."""
    node, value = _descend(path, tree)
    return list(_concrete(node, value).get("properties", {})) if node else []


def _descend(path: KeyPath, tree: Any) -> tuple[Node | None, Any]:
    """Return the schema of the value at `path`, and the value. Each is None if there is none."""
    node: Node | None = root()
    for key in path:
        inner = _concrete(node, tree) if node else {}
        node = inner.get("items") if isinstance(key, int) else inner.get("properties", {}).get(key)
        tree = tree[key] if exists(tree, (key,)) else None
    return node, tree


def walk(path: KeyPath = (), node: Node | None = None) -> Iterator[tuple[KeyPath, Node, bool]]:
    """Yield the path and the schema of every setting and section that is not inside a list, in the order of the
    classes, and whether it is a section."""
    for key, child in (node or root())["properties"].items():
        inner = _concrete(child, None)
        yield (*path, key), child, "properties" in inner
        if "properties" in inner:
            yield from walk((*path, key), inner)


def leaves() -> Iterator[tuple[KeyPath, Node]]:
    """Yield the path and the schema of every setting that is not inside a list."""
    yield from ((path, node) for path, node, is_section in walk() if not is_section)


def resolve(node: Node) -> Node:
    """Return the definition that a `$ref` points to, or the node itself if it is not a reference."""
    while "$ref" in node:
        rest = {key: value for key, value in node.items() if key != "$ref"}
        node = {**root()["$defs"][node["$ref"].rpartition("/")[2]], **rest}
    return node


def _concrete(node: Node, value: Any) -> Node:
    """Return the schema behind references, behind `X or null`, and of the module that `value` names."""
    node = resolve(node)
    if "oneOf" in node:
        name = value.get("name") if isinstance(value, dict) else None
        target = node["discriminator"]["mapping"].get(name) if isinstance(name, str) else None
        return resolve({"$ref": target}) if target else {}
    options = [option for option in node.get("anyOf", ()) if option.get("type") != "null"]
    return _concrete(options[0], value) if len(options) == 1 else node


def editor_schema() -> Node:
    """Return the JSON Schema of a config file, for editors.

    It allows `extends` and empty sections. Only keys inside lists are required, because all others may come from a
    file that is extended.
    """
    result = copy.deepcopy(root())
    result["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    result["title"] = "coordexp config"
    sections = json.dumps([node for _, node, is_section in walk() if is_section])
    names = sorted(set(re.findall(r"#/\$defs/(\w+)", sections)))
    for definition in (result, *(result["$defs"][name] for name in names)):
        required = definition.pop("required", [])
        for key, node in definition["properties"].items():
            if "$ref" in node and "default" not in node and key not in required:
                definition["properties"][key] = {"anyOf": [node, {"type": "null"}]}
    result["properties"]["extends"] = {
        "description": "Files whose values this one starts from. Paths are relative to this file.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return result


def describe(node: Node) -> str:
    """Return the type of a value in words: `an integer >= 1`, `one of vllm, hf`, `text or null`."""
    node = resolve(node)
    if "const" in node:
        return flow_yaml(node["const"])
    if "enum" in node:
        return "one of " + ", ".join(map(flow_yaml, node["enum"]))
    if "anyOf" in node:
        return " or ".join(describe(option) for option in node["anyOf"])
    if "oneOf" in node:
        return "a mapping whose name is one of " + ", ".join(module_names(node))
    if (kind := node.get("type", "")) == "array":
        return "a list of " + re.sub(r"^(?:a )?(text|mapping)$", r"\1s", describe(node["items"]))
    words = {"boolean": "true or false", "integer": "an integer", "number": "a number", "string": "text"}
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = " and ".join(f"{sign} {node[key]:g}" for key, sign in signs.items() if key in node)
    return f"{words.get(kind, 'null' if kind == 'null' else 'a mapping')} {bounds}".rstrip()


def module_names(node: Node) -> list[str]:
    """Return the names of the modules that a value with the schema `node`, such as a list entry, may have."""
    options = [option for choice in (node, *node.get("anyOf", ())) for option in choice.get("oneOf", ())]
    return [resolve(option)["properties"]["name"]["const"] for option in options]


def explain_errors(invalid: ValidationError, tree: Tree) -> list[Finding]:
    """Return a finding for each value that is wrong, missing or unknown in the tree, one for each mistake: a key
    that another one was meant to be is not missing."""
    errors: dict[KeyPath, Any] = {}
    for error in invalid.errors(include_url=False):
        is_follow_up = error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"]
        if not is_follow_up:  # pydantic calls a list too short if its items are wrong
            errors.setdefault(_find_path(error, tree), error)
    unknown = [path for path, error in errors.items() if error["type"] == "extra_forbidden"]
    explained = [item for path in unknown for item in _explain_unknown(path, tree)]
    meant = {item.new[:end] for item in explained for end in range(len(item.new) + 1)}
    for path, error in errors.items():
        if path not in unknown and not (error["type"] == "missing" and path in meant):
            explained.append(_explain(error, path, tree))
    return [Error(format_path(item.path), item.problem, item.fix) for item in explained]


def _find_path(error: Any, tree: Any) -> KeyPath:
    """Return the path in the file for pydantic's location, which also names the union member that it tried."""
    path: KeyPath = ()
    for key in error["loc"]:
        if exists(tree, (key,)):
            tree = tree[key]
        elif isinstance(tree, dict) and tree.get("name") == key:
            continue  # the kind of module, not a key
        elif error["type"] != "missing":
            break
        path = (*path, key)
    return path


def _explain_unknown(path: KeyPath, tree: Tree) -> list[Explanation]:
    """Return what to write instead of an unknown key. The old section gives one explanation for each of its keys,
    and the two keys of the old list of servers give one for both."""
    *parent, key = path
    name, section, entry = format_path(path), _descend(path[:-1], tree)[1], _descend(path[:-2], tree)[1]
    old = section[key].get(OLD_SECTION[2]) if path == OLD_SECTION[:2] and isinstance(section[key], dict) else None
    if isinstance(old, dict) and old:
        return [_explain_old((*OLD_SECTION, key), f"rollout_matching.{key}", "moved") for key in old]
    aliases = ALIASES.get(str(entry.get("name")) if isinstance(entry, dict) else "", {})
    if new := aliases.get(str(key)):
        return [Explanation(path, "renamed", f"use {new} instead", (*parent, new))]
    if key == "group_port" and "base_url" in section and name in REMOVED:
        return []
    if name in RENAMED or name in REMOVED:
        return [_explain_old(path, name, "renamed")]
    if parent == ["training"] and key in REFUSED:
        return [Explanation(path, *REFUSED[key])]
    names, close = names_at(path[:-1], tree), _closest(str(key), names_at(path[:-1], tree))
    likely = [(*parent, close)] if close else [there for there, _, _ in walk() if there[-1] == key]
    if len(likely) == 1:
        return [Explanation(path, "unknown key", f"did you mean {format_path(likely[0])}?", likely[0])]
    fix = f"allowed here: {', '.join(names) or 'nothing'}"
    if len(names) > MAX_LISTED_KEYS:
        fix = f"docs/reference/config.md lists the {len(names)} keys of {format_path(path[:-1])}"
    return [Explanation(path, "unknown key", fix)]


def _explain_old(path: KeyPath, name: str, verb: str) -> Explanation:
    new = RENAMED.get(name, name)
    if name in REMOVED:
        return Explanation(path, "removed", REMOVED[name])
    return Explanation(path, verb, f"use {new} instead", tuple(new.split(".")))


def _explain(error: Any, path: KeyPath, tree: Any) -> Explanation:
    """Return what one of pydantic's errors means to the user."""
    node = node_at(path, tree) or {}
    value = quote_value(error["input"], path)
    match error["type"]:
        case "missing":
            return Explanation(path, "missing", _example(path, node).replace("write e.g.", "add e.g."))
        case "union_tag_not_found":
            return Explanation((*path, "name"), "missing", f"write one of {', '.join(module_names(node))}")
        case "union_tag_invalid":
            name, known = error["ctx"]["tag"], module_names(node)
            close = _closest(name, known)
            fix = f"did you mean name: {close}?" if close else f"write one of {', '.join(known)}"
            return Explanation((*path, "name"), f"{quote_value(name, path)} is not a module", fix)
        case "value_error":
            return Explanation(path, f"{value}: {error['ctx']['error']}", _example(path, node))
        case "too_short":
            return Explanation(path, "is empty", _example(path, node))
    if path == ("custom", "trainer_variant") and error["input"] == OLD_VARIANT:
        return Explanation(path, f"{OLD_VARIANT} is the old name", "write trainer_variant: stage2_rollout_aligned")
    allowed = describe(node)
    allowed = allowed if len(allowed) < 200 else ", ".join(allowed.split(", ")[:8]) + ", ..."
    fix = _suggest(error["input"], path, node) or _example(path, node)
    return Explanation(path, f"{value} is not {allowed}", fix)


def _suggest(value: Any, path: KeyPath, node: Node) -> str:
    """Return the value that was probably meant: an allowed word that is similar to the wrong one, a number without
    its quotes, true for yes. Return "" if there is none."""
    options = [resolve(option) for option in (node, *resolve(node).get("anyOf", ()))]
    kinds = {option.get("type") for option in options}
    words = [word for option in options for word in option.get("enum", [option.get("const")])]
    if isinstance(value, str) and (close := _closest(value, [word for word in words if isinstance(word, str)])):
        return f"did you mean {path[-1]}: {close}?"
    bare = str(value).lower().replace("_", "")
    if "boolean" in kinds and bare in WORDS_OF_BOOLEANS:
        return f"write {path[-1]}: {WORDS_OF_BOOLEANS[bare]}"
    if kinds & {"integer", "number"} and isinstance(value, str) and bare.isdecimal():
        return f"write {path[-1]}: {bare}"
    return ""


def _closest(word: str, options: list[str]) -> str | None:
    folded = {option.casefold(): option for option in options}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=SIMILARITY)
    begun = [option for option in folded if len(word) > 2 and option.startswith(word.casefold())]
    return folded[(close or begun)[0]] if close or begun else None


def _example(path: KeyPath, node: Node) -> str:
    sample = _sample(node)
    if sample == {}:
        return f"{_meaning(node)}write a mapping of keys to values"
    key = f"{path[-1]}: " if path and isinstance(path[-1], str) else ""
    return f"{_meaning(node)}write e.g. {key}{flow_yaml(sample)}"


def _sample(node: Node) -> Any:
    """Return an example of an allowed value: one that is written in the settings class, the default, or a value of
    the type."""
    node = {**resolve(node), **node}
    node = resolve(node["oneOf"][0]) if "oneOf" in node else node
    for name in ("examples", "default", "const", "enum"):
        if name in node:
            return node[name][0] if name in ("examples", "enum") else node[name]
    if node.get("type") == "array":
        return [_sample(node["items"])] if node.get("minItems") else []
    if "properties" in node:
        return {key: _sample(node["properties"][key]) for key in node.get("required", ())}
    return {"boolean": True, "integer": 1, "number": 1.0}.get(node.get("type", ""), {})


def _meaning(node: Node) -> str:
    """Return the first sentence of the description, to be continued by what to write."""
    text = resolve(node).get("description", "") if node.get("type") != "object" else ""
    sentence = re.split(r"\.(?: |$)", text, maxsplit=1)[0]
    is_word = not sentence[1:2].isupper()
    return (sentence[0].lower() if is_word else sentence[0]) + sentence[1:] + "; " if sentence else ""


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
