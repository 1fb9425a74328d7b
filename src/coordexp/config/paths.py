"""Paths of keys and list indices into a tree of mappings and lists."""

from typing import Any

Key = str | int
KeyPath = tuple[Key, ...]


def format_path(path: KeyPath) -> str:
    """Return a path as text: ("servers", 0, "base_url") becomes `servers[0].base_url`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def parse_path(text: str) -> KeyPath:
    """Return the path that `format_path` writes as `text`."""
    parts = text.replace("[", ".[").split(".")
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in parts)


def value_at(tree: Any, path: KeyPath) -> Any:
    """Return the value at `path`, or None if the tree has no such path."""
    for key in path:
        is_item = isinstance(tree, list) and isinstance(key, int) and key < len(tree)
        if not is_item and not (isinstance(tree, dict) and key in tree):
            return None
        tree = tree[key]
    return tree


def copy_tree(tree: Any) -> Any:
    """Return a copy in which no two places share an object, so that a change at one place cannot show at another.

    `copy.deepcopy` would keep what YAML aliases share.
    """
    if isinstance(tree, dict):
        return {key: copy_tree(item) for key, item in tree.items()}
    return [copy_tree(item) for item in tree] if isinstance(tree, list) else tree


def fill(tree: Any, value: Any, path: KeyPath) -> list[KeyPath]:
    """Write `value` at `path` unless a value is there already, and return the paths that were filled.

    A mapping is merged into an existing mapping, key by key.
    """
    *parents, last = path
    for key in parents:
        if isinstance(tree, dict) and tree.get(key) is None:
            tree[key] = {}
        tree = value_at(tree, (key,))
        if not isinstance(tree, dict | list):
            return []
    present = value_at(tree, (last,))
    if isinstance(present, dict) and isinstance(value, dict):
        return [(*path[:-1], *filled) for key, item in value.items() for filled in fill(tree, item, (last, key))]
    if present is not None or not isinstance(tree, dict):
        return []
    tree[last] = value
    return [path]
