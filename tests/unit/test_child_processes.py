"""Sockets, files and shared memory of killed processes are removed, and those of other processes are not."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import psutil
import pytest

from coordexp import child_processes
from coordexp.errors import EngineError
from tests.source import SOURCE

pytestmark = pytest.mark.timeout(60)

# Maps a segment of its own and a given one, makes a socket, prints their names, and waits.
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
    """A segment of shared memory that belongs to this process."""
    memory = shared_memory.SharedMemory(create=True, size=64)
    yield memory
    memory.close()
    memory.unlink()


@pytest.fixture
def part(segment) -> Iterator[tuple[subprocess.Popen[str], Path, Path, int]]:
    """A tether, and the segment, the folder and the process id of the part below it."""
    made = child_processes.make_folder()
    words = ["-m", "coordexp.launch.tether", "--", sys.executable, "-c", PART, segment.name]
    tether = subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE), child_processes.RUN_FOLDER: str(made)},
    )
    assert tether.stdout is not None and tether.stdin is not None
    name, folder, pid = tether.stdout.readline().split()
    yield tether, Path("/dev/shm", name), Path(folder), int(pid)
    tether.stdin.close()
    tether.wait(20)
    tether.stdout.close()


def test_a_part_whose_starter_is_gone_leaves_no_sockets_or_memory_and_the_memory_of_others_stays(part, segment):
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


def test_the_mapped_segments_of_a_process_are_found(segment):
    assert f"/dev/shm/{segment.name}" in child_processes.find_segments(os.getpid())
    gone = shared_memory.SharedMemory(create=True, size=64)
    gone.unlink()
    assert f"/dev/shm/{gone.name}" not in child_processes.find_segments(os.getpid())
    gone.close()
    assert child_processes.find_segments(2**22 + 1) == set()


def test_processes_are_found_by_a_variable_of_their_environment_while_they_live():
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"COORDEXP_TEST_MARK": "of this test"},
    )
    assert child.stdout is not None
    child.stdout.readline()

    def find(value: str, candidates: list[psutil.Process] | None = None) -> list[int]:
        return [process.pid for process in child_processes.find_marked("COORDEXP_TEST_MARK", value, candidates)]

    try:
        assert find("of this test") == [child.pid]
        assert find("of another") == []
        assert find("of this test", [psutil.Process()]) == []
        process = psutil.Process(child.pid)
        assert child_processes.is_alive(process)
        process.kill()
        until = time.monotonic() + 5
        while child_processes.is_alive(process) and time.monotonic() < until:
            time.sleep(0.01)
        assert process.status() == psutil.STATUS_ZOMBIE and find("of this test") == []
    finally:
        child.kill()
        child.communicate()


# Makes a segment that two children of an engine use, and kills one of them while the engine would start. Prints
# the segment and the child that lives, and ends.
OWNER = """
import subprocess, sys, time
from coordexp.child_processes import recording_segments
MAP = "import sys, time\\nfrom multiprocessing import resource_tracker, shared_memory\\n"
MAP += "own = shared_memory.SharedMemory(**eval(sys.argv[1]))\\n"
MAP += "resource_tracker.unregister(own._name, 'shared_memory')\\nprint(own.name, flush=True)\\ntime.sleep(600)"
def start(options):
    words = [sys.executable, "-c", MAP, repr(options)]
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=quiet, text=True)
    return child, child.stdout.readline().strip()
with recording_segments(interval=0.01):
    first, name = start({"create": True, "size": 64})
    second, _ = start({"name": name})
    time.sleep(1)
    first.kill()
    first.wait()
print(name, second.pid)
"""


def test_the_memory_of_a_process_that_is_killed_while_an_engine_starts_is_removed_by_its_owner():
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    owner = subprocess.run([sys.executable, "-c", OWNER], capture_output=True, text=True, env=environment)
    assert owner.returncode == 0, owner.stderr
    name, living = owner.stdout.split()
    os.kill(int(living), signal.SIGKILL)
    assert not Path("/dev/shm", name).exists()


def test_a_segment_that_a_living_process_has_mapped_is_not_removed(segment):
    left = shared_memory.SharedMemory(create=True, size=64)
    left.close()
    names = {f"/dev/shm/{memory.name}" for memory in (segment, left)}
    child_processes.remove_unused_segments(names)
    assert [name for name in names if Path(name).exists()] == [f"/dev/shm/{segment.name}"]
    resource_tracker.unregister(f"/{left.name}", "shared_memory")
    child_processes.remove_unused_segments(set())


def test_the_folder_of_an_engine_is_removed_while_the_engine_still_makes_files(tmp_path, monkeypatch):
    folder, ended = tmp_path / "engine", threading.Event()
    folder.mkdir()
    monkeypatch.setenv("COORDEXP_ENGINE_FOLDER", str(folder))

    def make_files() -> None:
        while not ended.is_set():
            with suppress(FileNotFoundError):
                (folder / str(time.monotonic_ns())).touch()

    engine = threading.Thread(target=make_files)
    engine.start()
    try:
        while not any(folder.iterdir()):
            time.sleep(0.01)
        child_processes.remove_engine_folder()
        assert list(tmp_path.iterdir()) == []
        child_processes.remove_engine_folder()  # another process of the engine, which comes later
    finally:
        ended.set()
        engine.join()


def test_a_folder_has_a_name_that_is_short_enough_for_a_socket_of_an_engine_in_it(tmp_path, monkeypatch):
    for place in (tmp_path, tmp_path / ("long" * 30)):
        place.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        folder = child_processes.make_folder()
        try:
            name = f"{folder}/12345678/00000000-0000-0000-0000-000000000000"
            assert len(name) <= 107 and folder.name.startswith("coordexp-") and not list(folder.iterdir())
        finally:
            folder.rmdir()


def test_if_every_path_is_too_long_the_message_says_what_to_set(monkeypatch):
    monkeypatch.setattr(child_processes, "LONGEST", 3)
    with pytest.raises(EngineError, match="short enough for sockets\n  set TMPDIR"):
        child_processes.make_folder()


def test_only_their_owner_may_enter_the_folder_of_sockets():
    before = os.umask(0)
    try:
        folder = child_processes.make_folder()
    finally:
        os.umask(before)
    mode = folder.stat().st_mode & 0o777
    folder.rmdir()
    assert mode == 0o700
