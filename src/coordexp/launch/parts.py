"""The parts of a launch while they run: their processes, their log lines, and the health of rollout servers.

Every part leads a process group of its own, and Linux kills it if the launcher ends. All parts write to one log:
whole lines, each with its time, its level and the name of its part, in colour on a terminal.
"""

import codecs
import io
import os
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TextIO

import httpx
import psutil

from coordexp.child_processes import TORCHRUN_VARIABLES, end_with_parent
from coordexp.errors import EngineError, explain
from coordexp.launch.plan import Part
from coordexp.logs import COLOUR, FORMAT, STEERING, TERMINAL, Level, LogFormat, LogRecord, at_level
from coordexp.servers.protocol import TOKEN

LAST_LINES = 20  # of a part, which are repeated when it fails
BY_SIGNAL = 128  # higher exit codes mean that a signal ended the process, as in a shell
LEFT_S = 2.0  # the time that the other processes of a part have to end after it
UNKILLABLE_S = 30.0  # a process that hangs in a driver ends only when the driver returns: no use to wait longer
PROGRESS_EVERY_S = 5.0
LONGEST = 65_536  # characters after which a line without end is cut
COLOURS = ("36", "33", "35", "34", "32", "96", "93", "95")
LAUNCHER = "launch"

ANSWER_S = 2.0  # the time a rollout server has to answer the launcher

_LINE_END = re.compile(r"\r\n|\n|\r(?!$)")  # a \r at the very end may become \r\n


class Log:
    """A log that any number of threads may write to. Without a format it is made for readers: on a terminal, lines
    have colours and only the time of day. If its reader goes away (`coordexp launch | head`), the parts keep
    running."""

    def __init__(self, stream: TextIO, names: tuple[str, ...], log_format: LogFormat | None = None) -> None:
        self._stream, self._format = stream, log_format
        self._coloured = stream.isatty() and log_format is None
        self._width = max(map(len, (*names, LAUNCHER)))
        self._colours = {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(names)} | {LAUNCHER: "1"}
        self._lock = threading.Lock()
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def say(self, message: str, level: Level = "info") -> None:
        """Write a message of the launcher itself."""
        with at_level(level):
            self.write(LAUNCHER, message)

    def write(self, name: str, line: str) -> None:
        """Write a line of the part of this name, which may be a record in the JSON format, without anything that
        would steer a terminal."""
        record = LogRecord.parse(line)
        message = STEERING.sub("", record.message)
        record = replace(record, message=message if self._coloured else COLOUR.sub("", message))
        with self._lock:
            try:
                self._stream.write(self._to_text(name, record))
                self._stream.flush()
            except OSError:
                self._stream = io.StringIO()

    def _to_text(self, name: str, record: LogRecord) -> str:
        if self._format == "json":
            return record.to_json(name)
        prefix, lines = f"{name:<{self._width}} | ", record.message.splitlines() or [""]
        if not self._coloured:
            return "".join(f"{record.stamp}{prefix}{line}\n" for line in lines)
        prefix = f"\x1b[2m{record.time:%H:%M:%S}\x1b[0m \x1b[{self._colours.get(name, '0')}m{prefix}\x1b[0m"
        return "".join(f"{prefix}{line}\x1b[0m\n" for line in lines)


class Lines:
    """Splits text that arrives in pieces into whole lines.

    A progress bar redraws its line after a carriage return. It becomes one line every few seconds."""

    def __init__(self) -> None:
        self._rest = ""
        self._drawn = ""  # the latest state of a progress bar
        self._yielded_at = 0.0  # the time of the last line of a progress bar

    def feed(self, text: str) -> Iterator[str]:
        """Yield the lines that are complete with this text."""
        self._rest += text
        while end := _LINE_END.search(self._rest):
            line, self._rest = self._rest[: end.start()], self._rest[end.end() :]
            if end[0] == "\r":
                yield from self._progress(line)
            else:
                yield line if line.strip() else self._drawn
                self._drawn = ""
        if len(self._rest) > LONGEST:
            yield self._rest
            self._rest = ""

    def end(self) -> Iterator[str]:
        """Yield the last line, if it has no line end."""
        if last := self._rest.strip("\r") or self._drawn:
            yield last

    def _progress(self, line: str) -> Iterator[str]:
        self._drawn = line if line.strip() else self._drawn
        if self._drawn and time.monotonic() - self._yielded_at >= PROGRESS_EVERY_S:
            yield self._drawn
            self._drawn, self._yielded_at = "", time.monotonic()


class RunningPart:
    """The process of a part, which is started at once. Its output is copied to the log.

    `on_end` is called once from another thread, with the part and its exit code as in a shell. Processes below it
    that do not end by themselves, and have not left its process group, are killed before that."""

    def __init__(
        self, part: Part, token: str | None, log: Log, on_end: Callable[["RunningPart", int], None]
    ) -> None:
        self.part = part
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
            children = psutil.Process(self.pid).children() if self.part.ranks else []
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
        decoder, lines = codecs.getincrementaldecoder("utf-8")("replace"), Lines()
        with suppress(OSError):
            while chunk := os.read(self._process.stdout.fileno(), 65_536):
                for line in lines.feed(decoder.decode(chunk)):
                    self._write(log, line)
        for line in lines.end():
            self._write(log, line)

    def _write(self, log: Log, line: str) -> None:
        self.last.append(line)
        log.write(self.part.name, line)

    def _wait(self, on_end: Callable[["RunningPart", int], None]) -> None:
        code = self._process.wait()
        # The output ends when all of its processes have ended: also an engine, which Linux kills with its server,
        # the resource tracker that then removes shared memory, and the shell that removes the folder of sockets.
        self._reader.join(LEFT_S)
        kill_group(self._process.pid)
        self._reader.join(LEFT_S)
        on_end(self, BY_SIGNAL - code if code < 0 else code)


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


def health_client(token: str | None) -> httpx.Client:
    """Return a client for the two functions below. It uses no proxy, since the servers are on our own network."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(headers=headers, timeout=ANSWER_S, trust_env=False)


def is_ready(client: httpx.Client, base_url: str) -> bool:
    """Return True if a server answers at this address and reports that it is healthy."""
    with suppress(httpx.HTTPError):
        return client.get(f"{base_url}/health/").status_code == httpx.codes.OK
    return False


def read_world_size(client: httpx.Client, base_url: str) -> int:
    """Return the world size that a rollout server reports. Raise if there is no such server."""
    url = f"{base_url}/get_world_size/"
    with explain(httpx.HTTPError, url, "check that a rollout server runs there", to=EngineError):
        answer = client.get(url)
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise EngineError(
            f"{url}: the server expects another token than this run has",
            f"set {TOKEN} to the value that the server was started with",
        )
    size = None
    with suppress(ValueError, KeyError, TypeError):
        size = answer.json()["world_size"] if answer.is_success else None
    if type(size) is not int or size < 1:
        raise EngineError(
            f"{url}: {answer.status_code} {answer.text[:200]!r} is not the answer of a rollout server",
            "check whether another program listens there",
        )
    return size
