"""The processes of an engine end with their owner, and leave nothing, whatever they are doing."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.integration.servers import wait_for
from tests.source import SOURCE

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[3]


@contextmanager
def running(folder: Path, work: str) -> Iterator[dict[str, str]]:
    """Yield the pids of the owner, the engine and the worker, and the name of the worker's shared memory."""
    folder.mkdir()
    words = [sys.executable, "-m", "tests.unit.engine.tied_processes", str(folder), work]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{SOURCE}"}
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    printed: dict[str, str] = {}
    try:
        while "worker" not in printed:
            name, value = owner.stdout.readline().split()
            printed[name] = value
        yield printed
    finally:
        for name in ("owner", "engine", "worker"):
            if name in printed and psutil.pid_exists(int(printed[name])):
                os.kill(int(printed[name]), signal.SIGKILL)
        owner.wait()
        owner.stdout.close()


def wait_until_ended(*pids: str) -> None:
    """Wait until no process has these pids. One that its parent has not collected counts as ended."""

    def living() -> list[psutil.Process]:
        processes = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
        return [process for process in processes if process.status() != psutil.STATUS_ZOMBIE]

    wait_for(lambda: not living(), 15, lambda: str(living()))


@pytest.mark.parametrize("work", ["sleep", "use folder", "block threads", "watch alone"])
def test_when_the_owner_is_killed_the_engine_and_its_worker_end_and_leave_nothing(work, tmp_path):
    folder = tmp_path / "engine"
    with running(folder, work) as printed:
        os.kill(int(printed["owner"]), signal.SIGKILL)
        wait_until_ended(printed["engine"], printed["worker"])
        segment = Path("/dev/shm", printed["segment"])
        wait_for(lambda: not folder.exists() and not segment.exists(), 5, lambda: str(list(tmp_path.rglob("*"))))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("work", ["sleep", "block threads", "start late"])
def test_when_the_engine_is_killed_its_worker_ends_and_the_owner_does_not(work, tmp_path):
    folder = tmp_path / "engine"
    with running(folder, work) as printed:
        os.kill(int(printed["engine"]), signal.SIGKILL)
        if work == "start late":
            wait_until_ended(printed["engine"])
            (folder / "go").touch()
        wait_until_ended(printed["engine"], printed["worker"])
        assert psutil.Process(int(printed["owner"])).status() != psutil.STATUS_ZOMBIE
        if "segment" in printed:  # the owner would remove it, see recording_segments
            Path("/dev/shm", printed["segment"]).unlink()
