"""How the files of a run's dumps are named. Imports nothing heavy, so that every command can ask."""

import re
from pathlib import Path

FOLDER = "dumps"  # in a run folder
FOLLOWED = "followed"  # a folder inside of the dumps: later answers to the records of the first dump
_STEP_FILE = re.compile(r"step-(\d+)\.jsonl")


def step_file(step: int) -> str:
    return f"step-{step:06d}.jsonl"


def step_files(folder: Path) -> dict[int, Path]:
    """The files of examples in one folder, by step."""
    named = [(_STEP_FILE.fullmatch(file.name), file) for file in folder.glob("step-*.jsonl")]
    return dict(sorted((int(match[1]), file) for match, file in named if match))


def trained_file(file: str) -> str:
    """Beside a file of examples: what the model said of them when it was trained on them."""
    folder, slash, name = file.rpartition("/")
    return f"{folder}{slash}{name.replace('step-', 'trained-', 1)}"
