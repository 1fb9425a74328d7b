"""Child processes: what they must not inherit, how to find them, and how to remove what they leave behind.

The processes of a server's engine talk through sockets that have a path, and through shared memory that has a
name. Both stay when all processes are killed. The sockets are therefore put in a folder that belongs to the
server, and the segments of shared memory are read from the memory maps of the engine's processes while these live.
Whoever notices that the server is gone removes both: the tether of a part of `coordexp launch`, or the engine's
processes, which start `python -m coordexp.child_processes` for it before they end. If a process of the engine is
killed, the server removes them when it ends.
"""

import atexit
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

from coordexp.errors import EngineError

# Variables with these prefixes are for torchrun's own processes. Others that inherit them would wait for ranks.
TORCHRUN_VARIABLES = (
    "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_", "LOCAL_", "ROLE_", "TORCHELASTIC_",
)  # fmt: skip
RUN_FOLDER = "COORDEXP_RUN_FOLDER"  # in the environment of a part below a tether, which removes this folder
ENGINE_FOLDER = "COORDEXP_ENGINE_FOLDER"  # in the environment of an engine's processes: where its sockets are
PREFIX = "coordexp-"
SET_PARENT_DEATH_SIGNAL = 1  # an option of prctl, see linux/prctl.h
SEGMENTS = "/dev/shm/psm_"  # noqa: S108 - Python's names for shared memory, which vLLM's message queues use
# Bytes that the path of a folder may have. The path of a socket has at most 107, and vLLM adds 37 to that of its
# folder, which may be 9 below ours.
LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000") - len("/12345678")


def is_alive(process: psutil.Process) -> bool:
    """Return True if the process exists and has not ended."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def find_marked(
    variable: str, value: str, candidates: Iterable[psutil.Process] | None = None
) -> Iterator[psutil.Process]:
    """Yield the living processes that have this variable in their environment. Unset candidates are all processes
    of the machine."""
    for process in psutil.process_iter() if candidates is None else candidates:
        with suppress(psutil.Error):  # it has just ended, or belongs to another user
            if is_alive(process) and process.environ().get(variable) == value:
                yield process


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process, with the system call of this name."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def end_with_parent() -> None:
    """Have Linux kill this process when the thread that started it ends, whatever both are doing at that time."""
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


@cache
def engine_folder() -> Path:
    """Return the folder for the sockets and temporary files of this process's engines. It is removed when the
    process ends."""
    above = os.environ.get(RUN_FOLDER, "")
    folder = Path(tempfile.mkdtemp(prefix="", dir=above)) if Path(above).is_absolute() else make_folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def make_folder() -> Path:
    """Make a folder for temporary files, with a path that is short enough for sockets below it."""
    places = [os.environ.get("VLLM_RPC_BASE_PATH"), tempfile.gettempdir(), "/tmp"]  # noqa: S108 - mkdtemp makes it safe
    length = len(f"/{PREFIX}12345678")
    place = next((path for path in places if path and len(os.fsencode(path)) + length <= LONGEST), None)
    if place is None:
        problem = "no temporary folder has a path that is short enough for sockets"
        raise EngineError(problem, "set TMPDIR to a shorter one")
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))


def find_segments(pid: int) -> set[str]:
    """Return the files of the shared memory that a process has mapped; nothing if it has ended."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    names = {line.split(maxsplit=5)[-1] for line in lines if SEGMENTS in line}
    return {name for name in names if name.startswith(SEGMENTS) and not name.endswith("(deleted)")}


def remove_segments(names: Iterable[str]) -> None:
    """Remove shared memory. Segments that are gone already are skipped."""
    for name in names:
        with suppress(OSError):
            Path(name).unlink()


def remove_unused_segments(names: set[str]) -> None:
    """Remove the segments that no living process has mapped. The others may belong to somebody else, too."""
    if names:
        remove_segments(names.difference(*map(find_segments, psutil.pids())))


@contextmanager
def recording_segments(interval: float = 0.5) -> Iterator[None]:
    """Record the shared memory of this process's children while the block runs, in which an engine starts. When
    this process ends, it is removed, except what processes of others use: a child that is killed cannot do that
    itself, not even while it starts."""
    segments: set[str] = set()
    children: set[psutil.Process] = set()
    atexit.register(_remove_segments_of_engines, segments, children)

    def record() -> None:
        for child in psutil.Process().children(recursive=True):
            children.add(child)
            segments.update(find_segments(child.pid))

    def record_until_stopped() -> None:
        while not stopped.wait(interval):
            record()

    stopped = threading.Event()
    thread = threading.Thread(target=record_until_stopped, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        record()


def _remove_segments_of_engines(names: set[str], children: set[psutil.Process]) -> None:
    """Remove the segments that nobody uses but this process and the processes of its engines. Some of these may be
    about to end, and are no longer its children if the process between them was killed."""
    if names:
        own = {child.pid for child in children if child.is_running()} | {os.getpid()}
        remove_segments(names.difference(*map(find_segments, set(psutil.pids()) - own)))


def start_remover() -> "subprocess.Popen[bytes]":
    """Start a process that calls `remove_engine_folder` when this process, one of the engine's, has ended.

    This process itself must not lose the folder while it runs: it could wait for minutes for a file there, in a
    call that lets none of its threads run, not even the one that would end it. Keep the result: the remover waits
    until its standard input is closed."""
    words = [sys.executable, "-m", "coordexp.child_processes"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # finds this module as this process did
    return subprocess.Popen(words, stdin=subprocess.PIPE, env=environment, start_new_session=True)  # noqa: S603


def remove_engine_folder() -> None:
    """Remove the folder of an engine whose owner is gone. The environment must be that of the engine."""
    if folder := os.environ.get(ENGINE_FOLDER):
        aside = f"{folder}-removed"  # the engine may still make files, but no more in a folder of another name
        with suppress(OSError):  # another process of the engine was first
            Path(folder).rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    if above := os.environ.get(RUN_FOLDER):  # a living tether removes it itself
        with suppress(OSError):
            Path(above).rmdir()


if __name__ == "__main__":
    sys.stdin.read()
    remove_engine_folder()
