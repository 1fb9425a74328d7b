"""Sockets, files and shared memory of killed processes are removed."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coordexp import child_processes
from coordexp.errors import EngineError
from tests.source import SOURCE

pytestmark = pytest.mark.timeout(60)

# Makes shared memory and a socket, prints their names, and waits.
PART = """
import os, socket, time
from multiprocessing import shared_memory
own = shared_memory.SharedMemory(create=True, size=64)
folder = os.environ["COORDEXP_RUN_FOLDER"]
socket.socket(socket.AF_UNIX).bind(folder + "/socket")
print(own.name, folder, os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def part() -> Iterator[tuple[subprocess.Popen[str], Path, Path, int]]:
    """A tether, and the segment, the folder and the process id of the part below it."""
    made = child_processes.make_folder()
    tether = subprocess.Popen(
        [sys.executable, "-m", "coordexp.launch.tether", "--", sys.executable, "-c", PART],
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


def test_a_part_whose_starter_is_gone_leaves_no_sockets_or_memory(part):
    tether, segment, folder, _ = part
    assert segment.exists() and (folder / "socket").is_socket()
    tether.stdin.close()
    tether.wait(20)
    assert not segment.exists() and not folder.exists()


def test_a_part_that_is_killed_leaves_no_sockets_or_memory(part):
    tether, segment, folder, pid = part
    os.kill(pid, signal.SIGKILL)
    tether.wait(20)
    assert not segment.exists() and not folder.exists()


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


OWNER = """
import time
from coordexp.child_processes import engine_folder
print(engine_folder(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("is_below_a_tether", [False, True])
def test_the_folder_of_an_engine_is_removed_when_its_owner_is_killed(tmp_path, is_below_a_tether):
    above = tmp_path / "run"
    above.mkdir()
    variables = {"PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp_path)}
    variables |= {child_processes.RUN_FOLDER: str(above)} if is_below_a_tether else {}
    words = [sys.executable, "-c", OWNER]
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | variables)
    assert owner.stdout is not None
    with owner.stdout as shown:
        folder = Path(shown.readline().strip())
    assert folder.is_dir() and folder.is_relative_to(above) == is_below_a_tether
    (folder / "socket").touch()
    owner.kill()
    owner.wait()
    until = time.monotonic() + 20
    while (folder.exists() or (is_below_a_tether and above.exists())) and time.monotonic() < until:
        time.sleep(0.05)
    assert not folder.exists() and above.exists() != is_below_a_tether


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
