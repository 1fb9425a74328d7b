"""Ties a command to the process that started it: `python -m coordexp.launch.tether [--ranks] -- command ...`.

Standard input is a pipe that only the starter holds open. When it closes, however the starter ended, the command
and all that came from it are killed; what the command leaves when it ends is killed too. Nothing can get away: a
process that loses its parent becomes a child of the tether, in whichever session it is. SIGTERM is passed on to
the command. At the end the tether removes the sockets, temporary files and shared memory of engines below it.
"""

import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType

import psutil

from coordexp import leftovers

SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # of prctl, see linux/prctl.h
UNKILLABLE_S = 30.0  # a process that a driver holds ends when the driver lets go of it: no use to wait longer
BY_SIGNAL = 128  # exit codes above it: ended by a signal


def main(words: list[str]) -> int:
    ranks = words[0] == "--ranks"
    command = words[words.index("--") + 1 :]
    adopt_orphans()
    heard: list[int] = []
    woken = _listen(heard)
    folder = leftovers.make_folder()
    os.environ[leftovers.RUN_FOLDER] = str(folder)
    # A process of one thread: what runs between fork and exec meets no lock that another thread holds.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)  # noqa: S603
    code = None
    while code is None:
        ready, _, _ = select.select([sys.stdin.fileno(), woken], [], [])
        if woken in ready:
            woken.recv(4096)
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
            break  # the starter is gone
        while signal.SIGTERM in heard:
            heard.remove(signal.SIGTERM)
            _pass_on(child.pid, ranks)
        code = reap(child.pid)
    segments = kill_children()
    leftovers.remove_unused_segments(segments)
    shutil.rmtree(folder, ignore_errors=True)
    child.returncode = code if code is not None else BY_SIGNAL + signal.SIGKILL
    return child.returncode


def adopt_orphans() -> None:
    """Processes below this one whose parent ends become its children, and not those of init."""
    _prctl(SET_CHILD_SUBREAPER, 1)


def kill_children() -> set[str]:
    """Kill all processes below this one, again and again until there are none: they may be making new ones. Return
    the names of the shared memory that they had mapped."""
    until = time.monotonic() + UNKILLABLE_S
    segments: set[str] = set()
    while (found := psutil.Process().children(recursive=True)) and time.monotonic() < until:
        for process in found:
            segments |= leftovers.mapped_segments(process.pid)
            with suppress(psutil.NoSuchProcess):
                process.kill()
        reap(0)
        time.sleep(0.005)
    return segments


def reap(wanted: int) -> int | None:
    """Takes note of all children that have ended. Gives the exit code of the wanted one, if it is among them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == wanted:
                code = exit_code(os.waitstatus_to_exitcode(ended[1]))
    return code


def exit_code(returned: int) -> int:
    """As a shell gives it."""
    return BY_SIGNAL - returned if returned < 0 else returned


def _listen(heard: list[int]) -> socket.socket:
    """Handlers, and not SIG_IGN, which the command would inherit."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach())

    def note(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    return reader


def _end_with_parent() -> None:
    _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _pass_on(pid: int, ranks: bool) -> None:
    """To the ranks themselves: torchrun would give them half a minute, and then fail although they did not."""
    with suppress(psutil.NoSuchProcess):
        command = psutil.Process(pid)
        told = [child for child in command.children() if _is_rank(child)] if ranks else []
        for process in told or [command]:
            with suppress(psutil.NoSuchProcess):
                process.terminate()


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "LOCAL_RANK" in process.environ()
    except psutil.Error:
        return False


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
