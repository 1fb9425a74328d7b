"""Child processes: what they must not inherit, how to find them, and how to remove what they leave behind.

The processes of a server's engine talk through sockets that have a path, and through shared memory that has a
name. Both stay when these processes are killed. Python's resource tracker removes shared memory when the last
process that shares it has ended, and a shell the folder of the sockets.
"""

import atexit
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from coordexp.errors import EngineError

# Variables with these prefixes are for torchrun's own processes. Others that inherit them would wait for ranks.
TORCHRUN_VARIABLES = (
    "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_", "LOCAL_", "ROLE_", "TORCHELASTIC_",
)  # fmt: skip
RUN_FOLDER = "COORDEXP_RUN_FOLDER"  # in the environment of a part below a tether, which removes this folder
PREFIX = "coordexp-"
SET_PARENT_DEATH_SIGNAL = 1  # an option of prctl, see linux/prctl.h
# Bytes that the path of a folder may have. The path of a socket has at most 107, and vLLM adds 37 to that of its
# folder, which may be 9 below ours.
LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000") - len("/12345678")
_removers: list["subprocess.Popen[bytes]"] = []  # of the folders of this process


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
    # If this process is killed, the shell's input ends. The engine has ended too, a moment later.
    script = 'read _; sleep 1; rm -rf "$0"; [ -z "$1" ] || rmdir "$1"'
    words = ["/bin/sh", "-c", script, str(folder), above]
    _removers.append(subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True))  # noqa: S603
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
