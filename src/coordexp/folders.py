"""Folders that something is to be written to. Imports nothing heavy, so that every command can ask."""

from pathlib import Path


def is_free(folder: Path) -> bool:
    """Whether the folder is new or empty."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
