"""The processes of an engine end with their owner, and leave nothing, whatever they are doing."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests import zygote
from tests.integration.servers import wait_for
from tests.source import SOURCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[3]


@dataclass
class Running:
    """The processes that have been started, and the worker's shared memory."""

    owner: psutil.Process | None = None
    engine: psutil.Process | None = None
    worker: psutil.Process | None = None
    segment: Path | None = None


@contextmanager
def started(folder: Path, work: str) -> Iterator[Running]:
    """Start an owner, which starts an engine, which starts a worker. Yield them when the worker is at work."""
    folder.mkdir()
    words = ["-m", "tests.unit.servers.tied_processes", str(folder), work]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{SOURCE}"}
    reading, writing = os.pipe()
    owner = zygote.start(words, cwd=ROOT, env=environment, stdout=writing, stderr=2)
    os.close(writing)
    running = Running()
    try:
        with os.fdopen(reading) as shown:
            while running.worker is None:
                name, value = shown.readline().split()
                made = Path("/dev/shm", value) if name == "segment" else psutil.Process(int(value))
                setattr(running, name, made)
        yield running
    finally:
        owner.close()
        if running.segment is not None:
            running.segment.unlink(missing_ok=True)


def wait_until_ended(*processes: psutil.Process) -> None:
    """Wait until they have ended, whether or not their parents have noticed."""
    wait_for(lambda: not any(map(zygote.lives, processes)), 30, lambda: str(processes))


@pytest.mark.parametrize("work", ["sleep", "block threads"])
def test_when_the_owner_is_killed_the_engine_and_its_worker_end_and_leave_nothing(work, tmp_path):
    with started(tmp_path / "engine", work) as running:
        running.owner.kill()
        wait_until_ended(running.engine, running.worker)
        wait_for(lambda: not running.segment.exists(), 30)


@pytest.mark.parametrize("work", ["sleep", "block threads", "start late"])
def test_when_the_engine_is_killed_its_worker_ends_and_the_owner_does_not(work, tmp_path):
    folder = tmp_path / "engine"
    with started(folder, work) as running:
        running.engine.kill()
        if work == "start late":
            wait_until_ended(running.engine)
            (folder / "go").touch()
        wait_until_ended(running.engine, running.worker)
        time.sleep(1)
        assert zygote.lives(running.owner)
