"""Run a script of this folder in its own processes, which end with the call, also if it fails."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.source import SOURCE

ROOT = Path(__file__).parents[2]


def run_worker(script: str, *words: str, processes: int, timeout: float) -> None:
    """Run the script, with torchrun if there are several processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    launch = torchrun if processes > 1 else []
    worker = subprocess.Popen(
        [sys.executable, *launch, str(ROOT / "tests/integration" / script), *words],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{SOURCE}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = worker.communicate(timeout=timeout)
    finally:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
    assert worker.returncode == 0, errors[-4000:]
