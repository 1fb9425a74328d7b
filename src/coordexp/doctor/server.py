"""A real `coordexp serve`, below a tether: it ends with this process, however that is. Its lines go to a file."""

import os
import sys
import time
from pathlib import Path

import psutil

from coordexp.doctor.machine import Machine
from coordexp.errors import EngineError
from coordexp.launch import health
from coordexp.launch.log import Log
from coordexp.launch.part import Running
from coordexp.launch.plan import Part
from coordexp.launch.tether import UNKILLABLE_S
from coordexp.rollout.wire import TOKEN

MARK = "COORDEXP_DOCTOR"  # in the environment of all processes that a doctor starts, and of theirs
LOOK_S = 0.2
IN_ORDER_S = 20.0
ENDING_S = 5.0  # for processes that were ended to be gone


class Served:
    """`log` keeps what all servers of one check have printed."""

    def __init__(self, config: Path, machine: Machine, log: Path, url: str) -> None:
        self.url, self._machine = url, machine
        self._config = config
        self._stream = log.open("a", encoding="utf-8")
        self._log = Log(self._stream, ("server",))
        self._running: Running | None = None

    def start(self) -> float:
        """Ready when it returns; the seconds that it took."""
        gpus = self._machine.server_gpus
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        command = (sys.executable, "-m", "coordexp", "serve", "--config", str(self._config))
        began, most = time.monotonic(), self._machine.deadlines.start
        self._running = running = Running(Part("server", command, devices, gpus), {})
        running.watch(self._log, lambda code: self._log.say(f"exit code {code}"))
        with health.asking(os.environ.get(TOKEN)) as client:
            while not health.is_ready(client, self.url):
                if not running.alive:
                    raise EngineError(self._told("the server ended before it was ready"))
                if time.monotonic() - began > most:
                    raise EngineError(self._told(f"the server was not ready after {most:g} s"))
                time.sleep(LOOK_S)
        return time.monotonic() - began

    def kill(self) -> None:
        """By SIGKILL, its own process alone: what it leaves, others have to end."""
        assert self._running is not None
        for process in psutil.Process(self._running.pid).children():
            process.kill()

    def wait_gone(self) -> None:
        until = time.monotonic() + UNKILLABLE_S
        while self._running is not None and self._running.alive and time.monotonic() < until:
            time.sleep(0.01)

    def end(self) -> float | None:
        """In order: the seconds that it took; None if it had to be killed, or was not there."""
        if self._running is None or not self._running.alive:
            return None
        began = time.monotonic()
        self._running.ask_to_end()
        while self._running.alive and time.monotonic() - began < IN_ORDER_S:
            time.sleep(0.02)
        return None if self._running.alive else time.monotonic() - began

    def close(self) -> None:
        if self._running is not None:
            self._running.release()
            self._running.wait_killed()
        self._stream.close()

    def _told(self, what: str) -> str:
        assert self._running is not None
        lines = "\n".join(f"  | {line}" for line in self._running.last if line.strip())
        return f"{what}; its last lines:\n{lines or '  | (it said nothing)'}"


def left() -> dict[int, str]:
    """Processes that were started in this check, or by what was, and are alive: their commands."""
    mark, found = os.environ[MARK], {}
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            command = " ".join(process.cmdline())
            # Python's own, which ends with this process.
            if process.environ().get(MARK) == mark and "resource_tracker" not in command:
                found[process.pid] = command
        except psutil.Error:  # it has just ended, or is somebody else's
            continue
    return found


def left_for_long() -> dict[int, str]:
    until = time.monotonic() + ENDING_S
    while (found := left()) and time.monotonic() < until:
        time.sleep(LOOK_S)
    return found
