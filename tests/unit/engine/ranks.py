"""Run a worker module as two learner ranks, in real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.source import SOURCE

ROOT = Path(__file__).parents[3]


def run_two_ranks(module: str, folder: Path) -> list[dict[str, Any]]:
    """Run `python -m MODULE RANK FOLDER` for both ranks. Return the contents of `rank-RANK.json` that each
    writes."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(folder)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{SOURCE}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=110)[1][-3000:] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
