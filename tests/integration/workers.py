"""Run a script of this folder in its own processes, which end with the call, also if it fails."""

import os
from pathlib import Path

from tests import zygote
from tests.source import SOURCE

ROOT = Path(__file__).parents[2]


def run_worker(script: str, *words: str, processes: int, timeout: float) -> None:
    """Run the script, with torchrun if there are several processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    launch = torchrun if processes > 1 else []
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{SOURCE}", "OMP_NUM_THREADS": "1"}
    worker = [*launch, str(ROOT / "tests/integration" / script), *words]
    done = zygote.run(worker, cwd=ROOT, env=environment, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
