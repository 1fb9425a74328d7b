"""Log lines with a time and a level, as text or as JSON, for commands that run unattended.

`start_log` replaces the streams of this process that are not terminals. Whatever is written to them in one call
becomes one record, also from other libraries, so no call has to change. Progress bars, which redraw their line,
and known noise are left out. This module imports nothing heavy.
"""

import atexit
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, TextIO, get_args

LogFormat = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = get_args(Level)
FORMAT = "COORDEXP_LOG_FORMAT"  # the format of this process and of those that it starts
# Variables that would make a process believe that it writes to a terminal.
TERMINAL = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
NOISE = ("Triton is installed, but doesn't include CPU backend",)  # every process of an engine on a CPU says so

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
STEERING = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles and links
    r"|\x1b\[[0-9;?]*[ -/]*[@-ln-~]"  # moves and erasures, but no colour
    r"|\x1b(?![\[\]]).?|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]"
)
_WORD = re.compile(r"(?:[\[(][^\])]*[\])]:?\s*)*(debug|info|note|warning|error|critical|fatal)\b(?=[\s:])", re.I)
_PYTHON_WARNING = re.compile(r"\S+:\d+: \w*Warning: ")
_EXCEPTION = re.compile(r"Traceback \(most recent call last\):|[\w.]+(?:Error|Exception)(?::|$)")
_LEVELS: dict[str, Level] = {
    "debug": "debug",
    "warning": "warning",
    "error": "error",
    "critical": "error",
    "fatal": "error",
}
_level: ContextVar[Level | None] = ContextVar("level", default=None)


def say(message: str) -> None:
    """Print a message for the user to standard error."""
    from rich.console import Console  # takes a while to import

    Console(stderr=True, soft_wrap=True, highlight=False).print(message, markup=False)


@contextmanager
def at_level(level: Level) -> Iterator[None]:
    """Give the records that are written inside this context a level."""
    token = _level.set(level)
    try:
        yield
    finally:
        _level.reset(token)


def guess_level(message: str) -> Level:
    """Return the level that a message names at its beginning, and `info` if it names none."""
    if word := _WORD.match(message):
        return _LEVELS.get(word[1].lower(), "info")
    if _PYTHON_WARNING.match(message):
        return "warning"
    return "error" if _EXCEPTION.match(message) else "info"


@dataclass(frozen=True)
class LogRecord:
    """A message, its time and its level."""

    time: datetime
    level: Level
    message: str

    @classmethod
    def of(cls, message: str) -> "LogRecord":
        """Return a record of now, with the level of this context, or else with that of the message."""
        return cls(datetime.now().astimezone(), _level.get() or guess_level(message), message)

    @classmethod
    def parse(cls, line: str) -> "LogRecord":
        """Return the record that a line holds in the JSON format. Any other line is a message of now."""
        if line.startswith('{"time": '):
            try:
                fields = json.loads(line)
                if fields["level"] in LEVELS:
                    return cls(datetime.fromisoformat(fields["time"]), fields["level"], str(fields["message"]))
            except (ValueError, KeyError, TypeError):  # cut short, or of another program
                pass
        return cls.of(line)

    @property
    def stamp(self) -> str:
        """The time and the level, as they stand before a message in the text format."""
        return f"{self.time:%Y-%m-%d %H:%M:%S} {self.level.upper():<7} "

    def to_text(self) -> str:
        """Return the record as text. Only the first line of a message has the time and the level."""
        return f"{self.stamp}{self.message}\n"

    def to_json(self, process: str = "") -> str:
        """Return the record as one line of JSON, with the name of its process if there are several."""
        fields = {"time": self.time.isoformat(timespec="milliseconds"), "level": self.level}
        return json.dumps(fields | ({"process": process} if process else {}) | {"message": self.message}) + "\n"


class LogStream:
    """A stream that writes records to `target`. Other attributes are those of the target."""

    def __init__(self, target: TextIO, log_format: LogFormat) -> None:
        self._target, self._format = target, log_format
        self._rest = ""  # a line that has no end yet
        self._in_bar = False  # the latest line is a progress bar
        self._lock = threading.RLock()  # a signal handler may write while its thread writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        with self._lock:
            self._rest += self._drop_bars(text.replace("\r\n", "\n"))
            message, end, self._rest = self._rest.rpartition("\n")
            if end:
                self._write_record(message)
        return len(text)

    def finish(self) -> None:
        """Write a last line that has no end."""
        with self._lock:
            message, self._rest = self._rest, ""
            self._write_record(message)

    def _drop_bars(self, text: str) -> str:
        """Return the text without progress bars. A bar begins with a carriage return and ends with the line, or
        when something else is written."""
        _, drawn, rest = text.rpartition("\r")
        if drawn:
            _, end, rest = rest.partition("\n")
            self._rest, self._in_bar = "", not end
        elif self._in_bar:
            self._in_bar = not text.strip(" ")  # a space may blank the rest of a bar
            rest = text.removeprefix("\n")
        return "" if self._in_bar else rest

    def _write_record(self, message: str) -> None:
        message = COLOUR.sub("", STEERING.sub("", message)).strip("\n")
        if not message.strip() or any(noise in message for noise in NOISE):
            return
        record = LogRecord.of(message)
        self._target.write(record.to_json() if self._format == "json" else record.to_text())
        self._target.flush()


def start_log(log_format: LogFormat | None) -> None:
    """Write records from now on, to the streams that are not terminals. With a format, to both streams."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, LogStream) or (log_format is None and stream.isatty()):
            continue
        records = LogStream(_copy(stream), log_format or "text")
        setattr(sys, name, records)
        atexit.register(records.finish)
        for variable in TERMINAL:
            os.environ.pop(variable, None)
        sys.excepthook = _write_exception


def get_target(stream: TextIO) -> TextIO:
    """Return the stream to which a stream writes in the end."""
    return stream._target if isinstance(stream, LogStream) else stream


@contextmanager
def capture_children() -> Iterator[None]:
    """Turn the output of processes that are started inside this context into records of this process, as long as
    they live. Before `start_log`, do nothing: they write to the streams that they inherit."""
    stream = sys.stderr
    if not isinstance(stream, LogStream) or not _is_file(stream):
        yield
        return
    own = {number: os.dup(number) for number in (1, 2)}
    end, other_end = os.pipe()
    threading.Thread(target=_copy_lines, args=(end, stream), daemon=True).start()
    for number in own:
        os.dup2(other_end, number)
    os.close(other_end)
    try:
        yield
    finally:
        for number, copied in own.items():
            os.dup2(copied, number)
            os.close(copied)


def _copy(stream: TextIO) -> TextIO:
    """Return a stream to the same file, which `capture_children` does not redirect. A stream in memory is returned
    as it is."""
    if not _is_file(stream):
        return stream
    stream.flush()
    return os.fdopen(os.dup(stream.fileno()), "w", encoding="utf-8", errors="backslashreplace")


def _is_file(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (OSError, ValueError):
        return False


def _copy_lines(end: int, stream: LogStream) -> None:
    with os.fdopen(end, encoding="utf-8", errors="replace", newline="\n") as pipe:
        for line in pipe:
            stream.write(line if line.endswith("\n") else f"{line}\n")


def _write_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    with at_level("error"):
        sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))
