"""A real `coordexp serve` below a tether, so that it ends with this process. Its output goes to a file."""

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from coordexp.child_processes import find_marked
from coordexp.doctor.machine import Machine
from coordexp.errors import EngineError
from coordexp.launch.parts import Log, RunningPart, health_client, is_ready
from coordexp.launch.plan import Part, device_variables
from coordexp.launch.tether import UNKILLABLE_S
from coordexp.logs import LogRecord
from coordexp.servers.protocol import TOKEN

MARK = "COORDEXP_DOCTOR"  # in the environment of all processes that an examination starts
POLL_S = 0.2
IN_ORDER_S = 20.0
ENDING_S = 5.0  # for processes that were asked to end


class DoctorServer:
    """The server of one examination, which may be started several times. `log` keeps the output of all of them."""

    def __init__(self, config: Path, machine: Machine, log: Path, url: str) -> None:
        self.url, self._machine = url, machine
        self._config = config
        self._stream = log.open("a", encoding="utf-8")
        self._log = Log(self._stream, ("server",))
        self._running: RunningPart | None = None

    def start(self) -> float:
        """Start the server, wait until it is ready, and return the seconds that this took."""
        gpus = self._machine.server_gpus
        command = (sys.executable, "-m", "coordexp", "serve", "--config", str(self._config))
        began, most = time.monotonic(), self._machine.deadlines.start
        self._running = running = RunningPart(Part("server", command, device_variables(gpus), gpus), {})
        running.watch(self._log, self._log_exit_code)
        with health_client(os.environ.get(TOKEN)) as client:
            while not is_ready(client, self.url):
                if not running.is_alive:
                    raise EngineError(self._with_last_lines("the server ended before it was ready"))
                if time.monotonic() - began > most:
                    raise EngineError(self._with_last_lines(f"the server was not ready after {most:g} s"))
                time.sleep(POLL_S)
        return time.monotonic() - began

    def kill(self) -> None:
        """Send SIGKILL to the server process only. Its tether ends the processes that it leaves."""
        assert self._running is not None
        for process in psutil.Process(self._running.pid).children():
            process.kill()

    def wait_gone(self) -> None:
        """Wait until no process of the server is left."""
        until = time.monotonic() + UNKILLABLE_S
        while self._running is not None and self._running.is_alive and time.monotonic() < until:
            time.sleep(0.01)

    def end(self) -> float | None:
        """Ask the server to end, and return the seconds that this took. Return None if it does not end in time, or
        does not run."""
        if self._running is None or not self._running.is_alive:
            return None
        began = time.monotonic()
        self._running.ask_to_end()
        while self._running.is_alive and time.monotonic() - began < IN_ORDER_S:
            time.sleep(0.02)
        return None if self._running.is_alive else time.monotonic() - began

    def close(self) -> None:
        """Kill the server if it still runs, and close its log."""
        if self._running is not None:
            self._running.release()
            self._running.wait_killed()
        self._stream.close()

    def _log_exit_code(self, code: int) -> None:
        self._log.say(f"exit code {code}")

    def _with_last_lines(self, problem: str) -> str:
        assert self._running is not None
        return quote_lines(problem, (LogRecord.parse(line).message for line in self._running.last))


def quote_lines(problem: str, lines: Iterable[str]) -> str:
    """Return a problem with the last lines that a process printed."""
    quoted = "\n".join(f"  | {line}" for text in lines for line in text.splitlines() if line.strip())
    return f"{problem}; its last lines:\n{quoted or '  | (it printed nothing)'}"


def find_left_processes() -> dict[int, str]:
    """Return the commands of the processes of this examination, by process id. Those that are ending get some
    seconds for it."""
    until = time.monotonic() + ENDING_S
    while (commands := _find_processes()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return commands


def _find_processes() -> dict[int, str]:
    commands = {}
    for process in find_marked(MARK, os.environ[MARK]):
        with suppress(psutil.Error):  # it has just ended
            commands[process.pid] = " ".join(process.cmdline())
    commands.pop(os.getpid(), None)
    # Python's resource tracker ends with this process.
    return {pid: command for pid, command in commands.items() if "resource_tracker" not in command}
