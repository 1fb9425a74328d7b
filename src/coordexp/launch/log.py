"""One log of several parts: whole lines, each with the name of its part, in colour on a terminal.

Progress bars that draw over themselves by carriage returns become a line every few seconds; whatever else would
steer a terminal is taken out.
"""

import io
import re
import threading
import time
from collections.abc import Iterator
from typing import TextIO

PROGRESS_EVERY_S = 5.0
LONGEST = 65_536  # characters that are kept of a line that does not end
COLOURS = ("36", "33", "35", "34", "32", "96", "93", "95")
LAUNCHER = "launch"

_LINE_END = re.compile(r"\r\n|\n|\r(?!$)")  # a \r at the very end may become \r\n
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEERING = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles and links
    r"|\x1b\[[0-9;?]*[ -/]*[@-ln-~]"  # moves and erasures, but no colour
    r"|\x1b(?![\[\]]).?|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]"
)


class Log:
    """For any number of threads. A reader that went away (`coordexp launch | head`) stops no part."""

    def __init__(self, stream: TextIO, names: tuple[str, ...]) -> None:
        self._stream = stream
        self._coloured = stream.isatty()
        self._width = max(map(len, (*names, LAUNCHER)))
        self._colours = {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(names)} | {LAUNCHER: "1"}
        self._lock = threading.Lock()
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def say(self, message: str) -> None:
        for line in message.splitlines():
            self.write(LAUNCHER, line)

    def write(self, name: str, line: str) -> None:
        prefix = f"{name:<{self._width}} | "
        line = _STEERING.sub("", line)
        if self._coloured:
            prefix, line = f"\x1b[{self._colours.get(name, '0')}m{prefix}\x1b[0m", f"{line}\x1b[0m"
        else:
            line = _COLOUR.sub("", line)
        with self._lock:
            try:
                self._stream.write(f"{prefix}{line}\n")
                self._stream.flush()
            except OSError:
                self._stream = io.StringIO()


class Lines:
    """Whole lines out of text that comes in pieces."""

    def __init__(self) -> None:
        self._rest = ""
        self._drawn = ""  # what a progress bar showed last
        self._told = 0.0

    def feed(self, text: str) -> Iterator[str]:
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
        if last := self._rest.strip("\r") or self._drawn:
            yield last

    def _progress(self, line: str) -> Iterator[str]:
        self._drawn = line if line.strip() else self._drawn
        if self._drawn and time.monotonic() - self._told >= PROGRESS_EVERY_S:
            yield self._drawn
            self._drawn, self._told = "", time.monotonic()
