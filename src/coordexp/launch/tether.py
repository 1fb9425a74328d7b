"""Tie a command to the process that started it: `python -m coordexp.launch.tether [--ranks] -- command ...`.

Standard input is a pipe that only the starter holds open. When it closes, however the starter ended, the tether
kills the command and everything that came from it. Processes that the command leaves when it ends are killed too.
None can escape: a process that loses its parent becomes a child of the tether, whatever its session is. SIGTERM is
passed on to the command. At the end the tether removes the sockets and temporary files of the engines below it.
The starter makes the folder for these files, and names it in COORDEXP_RUN_FOLDER.
"""

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

from coordexp import child_processes

SET_CHILD_SUBREAPER = 36  # an option of prctl, see linux/prctl.h
UNKILLABLE_S = 30.0  # a process that hangs in a driver ends only when the driver returns: no use to wait longer
BY_SIGNAL = 128  # higher exit codes mean that a signal ended the process


def main(words: list[str]) -> int:
    ranks = words[0] == "--ranks"
    command = words[words.index("--") + 1 :]
    adopt_orphans()
    signals: list[int] = []
    wake_up = _record_signals(signals)
    # This process has one thread, so the code between fork and exec cannot wait for a lock of another thread.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=child_processes.end_with_parent)  # noqa: S603
    code = None
    while code is None:
        ready, _, _ = select.select([sys.stdin.fileno(), wake_up], [], [])
        if wake_up in ready:
            wake_up.recv(4096)
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
            break  # the starter is gone
        while signal.SIGTERM in signals:
            signals.remove(signal.SIGTERM)
            _pass_on_sigterm(child.pid, ranks)
        code = reap(child.pid)
    kill_children()
    shutil.rmtree(os.environ[child_processes.RUN_FOLDER], ignore_errors=True)
    child.returncode = code if code is not None else BY_SIGNAL + signal.SIGKILL
    return child.returncode


def adopt_orphans() -> None:
    """Make processes below this one whose parent ends children of this process, instead of init's."""
    child_processes.prctl(SET_CHILD_SUBREAPER, 1)


def kill_children() -> None:
    """Kill all processes below this one, repeatedly, since they may start new ones. A resource tracker of Python
    ends by itself when they have, and removes the shared memory of engines before."""
    until = time.monotonic() + UNKILLABLE_S
    while (descendants := psutil.Process().children(recursive=True)) and time.monotonic() < until:
        for process in descendants:
            with suppress(psutil.NoSuchProcess):
                if not _is_tracker(process):
                    process.kill()
        reap(0)
        time.sleep(0.005)


def _is_tracker(process: psutil.Process) -> bool:
    return any("multiprocessing.resource_tracker" in word for word in process.cmdline())


def reap(child: int) -> int | None:
    """Collect all children that have ended. Return the exit code of `child` if it is one of them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = to_shell_code(os.waitstatus_to_exitcode(ended[1]))
    return code


def to_shell_code(returncode: int) -> int:
    """Return the exit code that a shell would give for a return code of `subprocess`."""
    return BY_SIGNAL - returncode if returncode < 0 else returncode


def _record_signals(signals: list[int]) -> socket.socket:
    """Add the signals that arrive to a list. Return a socket that can be read after each of them.

    Unlike SIG_IGN, handlers are not inherited by the command."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach())

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    return reader


def _pass_on_sigterm(pid: int, ranks: bool) -> None:
    """Send SIGTERM to the command, or directly to its ranks. torchrun would give these only half a minute, and
    would then fail although they did not."""
    with suppress(psutil.NoSuchProcess):
        command = psutil.Process(pid)
        receivers = [child for child in command.children() if _is_rank(child)] if ranks else []
        for process in receivers or [command]:
            with suppress(psutil.NoSuchProcess):
                process.terminate()


def _is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "LOCAL_RANK" in process.environ()
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
