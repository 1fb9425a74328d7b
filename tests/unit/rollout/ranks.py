"""Run a worker module as several learner ranks, in real processes."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests import zygote
from tests.source import SOURCE

ROOT = Path(__file__).parents[3]


def run_ranks(module: str, folder: Path, ranks: int = 2, seconds: float = 110) -> list[dict[str, Any]]:
    """Run `python -m MODULE RANK FOLDER` for all ranks. Return the contents of `rank-RANK.json` that each
    writes."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{SOURCE}"}

    def run_rank(rank: int) -> subprocess.CompletedProcess[str]:
        return zygote.run(["-m", module, str(rank), str(folder)], cwd=ROOT, env=environment, timeout=seconds)

    with ThreadPoolExecutor(ranks) as pool:
        ended = list(pool.map(run_rank, range(ranks)))
    assert [done.returncode for done in ended] == [0] * ranks, [done.stderr[-3000:] for done in ended]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
