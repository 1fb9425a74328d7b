"""The parts of a launch while they run: their processes, their log lines, and whether a rollout server is ready.

Every part leads a process group of its own, and Linux kills it if the launcher ends. All parts write to one log:
whole lines, each with its time, its level and the name of its part, in colour on a terminal.
"""

import io
import json
import logging
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, TextIO

import httpx
import psutil

from coordexp.child_processes import TORCHRUN_VARIABLES, end_with_parent
from coordexp.launch.plan import Part
from coordexp.logs import ESCAPES, FORMAT, TERMINAL, JsonFormatter, LogFormat
from coordexp.servers.protocol import TOKEN

LAST_LINES = 20  # of a part, which are repeated when it fails
BY_SIGNAL = 128  # higher exit codes mean that a signal ended the process, as in a shell
LEFT_S = 2.0  # the time that the other processes of a part have to end after it
UNKILLABLE_S = 30.0  # a process that hangs in a driver ends only when the driver returns: no use to wait longer
COLOURS = ("36", "33", "35", "34", "32", "96", "93", "95")
LAUNCHER = "launch"


class Log:
    """The log of a launch, which any number of threads may write to. If its reader goes away
    (`coordexp launch | head`), the parts keep running."""

    def __init__(self, stream: TextIO, names: tuple[str, ...], log_format: LogFormat | None = None) -> None:
        self._handler = _LogHandler(stream)
        coloured = stream.isatty() and log_format is None
        width = max(map(len, (*names, LAUNCHER)))
        formatter = JsonFormatter() if log_format == "json" else PartFormatter(names, width, coloured)
        self._handler.setFormatter(formatter)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def say(self, message: str, level: int = logging.INFO) -> None:
        """Write a message of the launcher itself."""
        self._write(LAUNCHER, {"msg": message, "levelno": level})

    def write(self, name: str, line: str) -> None:
        """Write a line of the part of this name: a record in the JSON format, or a line of any other program."""
        self._write(name, read_record(line) or {"msg": line, "levelno": logging.INFO})

    def _write(self, name: str, fields: dict[str, Any]) -> None:
        level = logging.getLevelName(fields["levelno"])
        self._handler.handle(logging.makeLogRecord({"part": name, "levelname": level, **fields}))


def read_record(line: str) -> dict[str, Any] | None:
    """Return the fields of the record that a line in the JSON format holds, or None if it is another line."""
    if line.startswith('{"time": '):
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # cut short, or of another program
            fields = json.loads(line)
            created = datetime.fromisoformat(fields["time"]).timestamp()
            level = logging.getLevelNamesMapping()[fields["level"].upper()]
            return {"created": created, "levelno": level, "msg": str(fields["message"])}
    return None


class PartFormatter(logging.Formatter):
    """Lines with the time, the level and the name of the part; in colour, with the time of day and the name."""

    def __init__(self, names: tuple[str, ...], width: int, coloured: bool) -> None:
        super().__init__()
        self._width, self._coloured = width, coloured
        self._colours = {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(names)} | {LAUNCHER: "1"}

    def format(self, record: logging.LogRecord) -> str:
        part = record.part  # type: ignore[attr-defined]
        time, name = datetime.fromtimestamp(record.created), f"{part:<{self._width}} | "
        prefix = f"{time:%Y-%m-%d %H:%M:%S} {record.levelname:<7} {name}"
        if self._coloured:
            prefix = f"\x1b[2m{time:%H:%M:%S}\x1b[0m \x1b[{self._colours[part]}m{name}\x1b[0m"
        return "\n".join(prefix + ESCAPES.sub("", line) for line in record.getMessage().splitlines() or [""])


class _LogHandler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Write to nowhere from now on: the reader has gone away."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


class RunningPart:
    """The process of a part, which is started at once. Its output is copied to the log.

    `on_end` is called from another thread when it has ended, with its exit code as in a shell. Processes below it
    that do not end by themselves, and have not left its process group, are killed before that."""

    def __init__(self, part: Part, token: str | None, log: Log, on_end: Callable[["RunningPart"], None]) -> None:
        self.name, self.code, self.began = part.name, 0, time.monotonic()
        self._has_ranks = part.ranks
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._process = subprocess.Popen(  # noqa: S603 - the plan's own commands
            part.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(part, token),
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()
        self._waiter = threading.Thread(target=self._wait, args=(on_end,), daemon=True)
        self._waiter.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask_to_end(self) -> None:
        """Send SIGTERM, which lets the command end in order. The ranks of torchrun get it directly: torchrun would
        give them only half a minute, and would then fail although they did not."""
        ranks: list[psutil.Process] = []
        with suppress(psutil.Error):
            children = psutil.Process(self.pid).children() if self._has_ranks else []
            ranks = [child for child in children if "LOCAL_RANK" in child.environ()]
        for process in ranks or [self._process]:
            with suppress(psutil.NoSuchProcess):
                process.terminate()

    def kill(self) -> None:
        """Kill the command. The engine of a server and the ranks of torchrun end with it."""
        self._process.kill()

    def wait_until_ended(self) -> None:
        self._waiter.join(UNKILLABLE_S)

    def _read(self, log: Log) -> None:
        assert self._process.stdout is not None
        output = io.TextIOWrapper(self._process.stdout, encoding="utf-8", errors="replace", newline="\n")
        for line in output:
            shown = line.rstrip("\r\n").rpartition("\r")[2]  # of a progress bar, its last state
            self.last.append(shown)
            log.write(self.name, shown)

    def _wait(self, on_end: Callable[["RunningPart"], None]) -> None:
        code = self._process.wait()
        # The output ends when all of its processes have ended: also an engine, which Linux kills with its server,
        # the resource tracker that then removes shared memory, and the shell that removes the folder of sockets.
        self._reader.join(LEFT_S)
        kill_group(self._process.pid)
        self._reader.join(LEFT_S)
        self.code = BY_SIGNAL - code if code < 0 else code
        on_end(self)


def kill_group(group: int) -> None:
    """Kill the processes of a group. A resource tracker of Python ends by itself when they have, and removes their
    shared memory before."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):  # it has just ended
            if os.getpgid(process.pid) == group and "resource_tracker" not in " ".join(process.cmdline()):
                process.kill()


def _environment(part: Part, token: str | None) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(TORCHRUN_VARIABLES) and name not in TERMINAL
    }
    # `Log` reads the level of a message, and where it ends, from the JSON format.
    own = {"PYTHONUNBUFFERED": "1", FORMAT: "json"} | ({TOKEN: token} if token else {})
    return inherited | own | dict(part.env)


def is_ready(client: httpx.Client, base_url: str) -> bool:
    """Return True if a server answers at this address and reports that it is healthy."""
    with suppress(httpx.HTTPError):
        return client.get(f"{base_url}/health/").status_code == httpx.codes.OK
    return False
