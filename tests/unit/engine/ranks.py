"""Run a worker module as several learner ranks, in real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.source import SOURCE

ROOT = Path(__file__).parents[3]


def run_ranks(module: str, folder: Path, ranks: int = 2, seconds: float = 110) -> list[dict[str, Any]]:
    """Run `python -m MODULE RANK FOLDER` for all ranks. Return the contents of `rank-RANK.json` that each
    writes."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(folder)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{SOURCE}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=seconds)[1][-3000:] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, errors
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
