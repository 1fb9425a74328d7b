"""Files and folders that a command is given. Imports nothing heavy, so that every command can ask."""

import re
from pathlib import Path


def is_free(folder: Path) -> bool:
    """Whether the folder is new or empty."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def how_to_find(setting: str, name: str) -> str:
    """Return what to do about a file or folder that does not exist. A model may have been named as on the hub."""
    here = "paths are relative to the folder that the command runs in"
    if setting != "model.path" or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        return here
    return (
        f"{here}; a model of the Hugging Face hub is downloaded first (hf download {name} --local-dir DIR) and "
        "then given the coordinate tokens (coordexp model add-coords --model DIR --out NEW)"
    )
