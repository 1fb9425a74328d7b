"""Child processes: what they must not inherit, how they end with their parent, and the folder of their sockets.

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
from functools import cache
from pathlib import Path

from coordexp.errors import EngineError

# Variables with these prefixes are for torchrun's own processes. Others that inherit them would wait for ranks.
TORCHRUN_VARIABLES = (
    "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_", "LOCAL_", "ROLE_", "TORCHELASTIC_",
)  # fmt: skip
SET_PARENT_DEATH_SIGNAL = 1  # an option of prctl, see linux/prctl.h
# Bytes that the path of a folder may have. The path of a socket has at most 107, and vLLM adds 37 to that of its
# folder, which may be 9 below ours.
LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000") - len("/12345678")
PREFIX = "coordexp-"
_removers: list["subprocess.Popen[bytes]"] = []  # of the folders of this process
_libc = ctypes.CDLL(None, use_errno=True)  # opened here, so that nothing is loaded between a fork and an exec


def end_with_parent(parent: int) -> None:
    """Have Linux kill this process when the thread that started it ends, whatever both are doing at that time.

    `parent` is the process id of the parent. If that has ended before, this process ends at once. The setting
    outlives an exec, and new processes do not inherit it."""
    if _libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        os._exit(1)


@cache
def engine_folder() -> Path:
    """Return the folder for the sockets and temporary files of this process's engines. It is removed when the
    process ends."""
    folder = make_folder()
    # If this process is killed, the shell's input ends. The engine has ended too, a moment later.
    words = ["/bin/sh", "-c", 'read _; sleep 1; rm -rf "$0"', str(folder)]
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
