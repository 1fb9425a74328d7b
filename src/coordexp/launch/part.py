"""One part that runs: its process, its lines, and its end. Each is in a session of its own, below a tether."""

import codecs
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from coordexp import torchrun
from coordexp.launch.log import Lines, Log
from coordexp.launch.plan import Part
from coordexp.launch.tether import exit_code

TOLD = 20  # last lines of a part that are told again when it fails
SWEPT_S = 35.0  # that a tether may take to end all below it
# What would make a part believe that it writes to a terminal.
TERMINAL = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


class Running:
    """Starts it; `extra` comes to its environment."""

    def __init__(self, part: Part, extra: Mapping[str, str]) -> None:
        self.part = part
        self.since = time.monotonic()
        self.last: deque[str] = deque(maxlen=TOLD)
        tether = [sys.executable, "-m", "coordexp.launch.tether", *(["--ranks"] if part.ranks else []), "--"]
        self._process = subprocess.Popen(  # noqa: S603 - the plan's own commands
            [*tether, *part.command],
            stdin=subprocess.PIPE,  # closes when this process ends, whatever ends it
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(part, extra),
            start_new_session=True,
        )
        self._reader: threading.Thread | None = None

    def watch(self, log: Log, ended: Callable[[int], None]) -> None:
        """`ended` is called from another thread, once, with the exit code as a shell gives it."""
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, args=(ended,), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask_to_end(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def release(self) -> None:
        """At once, with all that came from it."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait_killed(self) -> None:
        """After `release`: the tether sweeps. One that cannot is killed, and what it leaves has to be swept."""
        try:
            self._process.wait(SWEPT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._read_to_end()

    def _read(self, log: Log) -> None:
        assert self._process.stdout is not None
        decode, lines = codecs.getincrementaldecoder("utf-8")("replace"), Lines()
        with suppress(OSError):
            while chunk := os.read(self._process.stdout.fileno(), 65_536):
                for line in lines.feed(decode.decode(chunk)):
                    self._tell(log, line)
        for line in lines.end():
            self._tell(log, line)

    def _tell(self, log: Log, line: str) -> None:
        self.last.append(line)
        log.write(self.part.name, line)

    def _wait(self, ended: Callable[[int], None]) -> None:
        code = exit_code(self._process.wait())
        self._read_to_end()
        ended(code)

    def _read_to_end(self) -> None:
        """Not for long: what a killed tether leaves may hold the pipe open."""
        if self._reader is not None:
            self._reader.join(1.0)


def environment(part: Part, extra: Mapping[str, str]) -> dict[str, str]:
    passed_on = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(torchrun.VARIABLES) and name not in TERMINAL
    }
    return passed_on | {"PYTHONUNBUFFERED": "1"} | dict(extra) | dict(part.env)
