"""Ranks that share or repeat a learner give the whole, merged weights that one process gives."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordexp.demo.model import Size, make_model

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks_give_the_weights_of_one_process_with_and_without_adapters(tmp_path, mode):
    size = Size(hidden=64, layers=1, patch=8, vision_hidden=32, vision_depth=1)
    folders = [make_model(tmp_path / name, "small", tied=name == "tied", size=size) for name in ("tied", "untied")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "tests/integration/weights_worker.py"), mode, *map(str, folders)]
    worker = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = worker.communicate(timeout=90)
    finally:
        if worker.poll() is None:
            os.killpg(worker.pid, signal.SIGKILL)
    assert worker.returncode == 0, errors[-4000:]
