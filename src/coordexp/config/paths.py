"""Paths into a tree of mappings and lists: how they are written, followed and changed."""

from typing import Any

Key = str | int
Path = tuple[Key, ...]


def dotted(path: Path) -> str:
    """("servers", 0, "base_url") is `servers[0].base_url`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def keys_of(text: str) -> Path:
    """The other way round."""
    parts = text.replace("[", ".[").split(".")
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in parts)


def value_at(tree: Any, path: Path) -> Any:
    """What stands at `path`, or None."""
    for key in path:
        is_item = isinstance(tree, list) and isinstance(key, int) and key < len(tree)
        if not is_item and not (isinstance(tree, dict) and key in tree):
            return None
        tree = tree[key]
    return tree


def unshared(tree: Any) -> Any:
    """A copy in which no part stands in two places, so that a change of one place is a change of one."""
    if isinstance(tree, dict):
        return {key: unshared(item) for key, item in tree.items()}
    return [unshared(item) for item in tree] if isinstance(tree, list) else tree


def move(tree: Any, value: Any, path: Path) -> list[Path]:
    """Puts `value` at `path` as far as nothing stands there yet, and says which paths it filled. A mapping is
    merged into one that is there."""
    *parents, last = path
    for key in parents:
        if isinstance(tree, dict) and tree.get(key) is None:
            tree[key] = {}
        tree = value_at(tree, (key,))
        if not isinstance(tree, dict | list):
            return []
    present = value_at(tree, (last,))
    if isinstance(present, dict) and isinstance(value, dict):
        return [(*path[:-1], *filled) for key, item in value.items() for filled in move(tree, item, (last, key))]
    if present is not None or not isinstance(tree, dict):
        return []
    tree[last] = value
    return [path]
