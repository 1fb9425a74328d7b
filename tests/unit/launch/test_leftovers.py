"""What killed processes leave is removed, and nothing that belongs to others is."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest

from coordexp import leftovers
from coordexp.errors import EngineError
from tests.source import SOURCE

pytestmark = pytest.mark.timeout(60)

# Maps a segment of its own and one that is given, makes a file and a socket, says so, and waits.
PART = """
import os, socket, sys, time
from multiprocessing import resource_tracker, shared_memory
own, other = shared_memory.SharedMemory(create=True, size=64), shared_memory.SharedMemory(name=sys.argv[1])
resource_tracker.unregister(own._name, "shared_memory")
resource_tracker.unregister(other._name, "shared_memory")
folder = os.environ["COORDEXP_RUN_FOLDER"]
socket.socket(socket.AF_UNIX).bind(folder + "/socket")
print(own.name, folder, os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def segment() -> Iterator[shared_memory.SharedMemory]:
    """Shared memory of this process."""
    found = shared_memory.SharedMemory(create=True, size=64)
    yield found
    found.close()
    found.unlink()


@pytest.fixture
def part(segment) -> Iterator[tuple[subprocess.Popen[str], Path, Path, int]]:
    """A tether with a part below it, the part's segment, its folder, and its process."""
    words = ["-m", "coordexp.launch.tether", "--", sys.executable, "-c", PART, segment.name]
    tether = subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
    )
    assert tether.stdout is not None and tether.stdin is not None
    name, folder, pid = tether.stdout.readline().split()
    yield tether, Path("/dev/shm", name), Path(folder), int(pid)
    tether.stdin.close()
    tether.wait(20)
    tether.stdout.close()


def test_a_part_whose_starter_is_gone_leaves_neither_sockets_nor_memory_and_that_of_others_stays(part, segment):
    tether, own, folder, _ = part
    assert own.exists() and (folder / "socket").is_socket()
    tether.stdin.close()
    tether.wait(20)
    assert not own.exists() and not folder.exists()
    assert Path("/dev/shm", segment.name).exists()


def test_a_folder_is_removed_when_its_part_is_killed(part):
    tether, _, folder, pid = part
    os.kill(pid, signal.SIGKILL)
    tether.wait(20)
    assert not folder.exists()


def test_the_segments_of_a_process_are_those_that_it_has_mapped(segment):
    assert f"/dev/shm/{segment.name}" in leftovers.mapped_segments(os.getpid())
    gone = shared_memory.SharedMemory(create=True, size=64)
    gone.unlink()
    assert f"/dev/shm/{gone.name}" not in leftovers.mapped_segments(os.getpid())
    gone.close()
    assert leftovers.mapped_segments(2**22 + 1) == set()


def test_a_segment_that_a_living_process_has_mapped_is_not_removed(segment):
    left = shared_memory.SharedMemory(create=True, size=64)
    left.close()
    names = {f"/dev/shm/{one.name}" for one in (segment, left)}
    leftovers.remove_unused_segments(names)
    assert [name for name in names if Path(name).exists()] == [f"/dev/shm/{segment.name}"]
    resource_tracker.unregister(f"/{left.name}", "shared_memory")
    leftovers.remove_unused_segments(set())


def test_a_folder_has_a_name_that_is_short_enough_for_a_socket_of_an_engine_in_it(tmp_path, monkeypatch):
    for place in (tmp_path, tmp_path / ("long" * 30)):
        place.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        folder = leftovers.make_folder()
        try:
            name = f"{folder}/12345678/00000000-0000-0000-0000-000000000000"
            assert len(name) <= 107 and folder.name.startswith("coordexp-") and not list(folder.iterdir())
        finally:
            folder.rmdir()


def test_where_every_path_is_too_long_the_way_out_is_told(monkeypatch):
    monkeypatch.setattr(leftovers, "LONGEST", 3)
    with pytest.raises(EngineError, match="short enough for sockets\n  set TMPDIR"):
        leftovers.make_folder()
