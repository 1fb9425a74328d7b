"""Messages of commands: plain on a terminal, and elsewhere as records with a time and a level, as text or as JSON.

This is Python's `logging`. Messages of coordexp are records of the logger `coordexp`, and what other libraries
write with `logging` or `warnings` comes in the same form. This module imports nothing heavy.
"""

import json
import logging
import os
import re
import sys
from datetime import datetime
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]
FORMAT = "COORDEXP_LOG_FORMAT"  # the format of this process and of those that it starts
# Variables that would make a process believe that it writes to a terminal.
TERMINAL = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
WARNING = "warning: "  # the beginning of our messages that are warnings
# What would steer or colour a terminal: titles and links, other sequences, and control characters.
ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b(?![\[\]]).?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)

logger = logging.getLogger("coordexp")
logger.setLevel(logging.INFO)


def say(message: str) -> None:
    """Show a message to the user."""
    logger.log(logging.WARNING if message.startswith(WARNING) else logging.INFO, message)


class PlainHandler(logging.Handler):
    """Writes messages alone to standard error, in colour on a terminal if they are texts of rich."""

    def emit(self, record: logging.LogRecord) -> None:
        from rich.console import Console  # takes a while to import
        from rich.text import Text

        message = record.msg if isinstance(record.msg, Text) else Text(self.format(record))
        Console(stderr=True, soft_wrap=True, highlight=False).print(message)


class RecordHandler(logging.StreamHandler[TextIO]):
    """Writes records to what is standard error at the time."""

    def __init__(self, log_format: LogFormat) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class TextFormatter(logging.Formatter):
    """The time, the level and the message. Only the first line of a message has the time and the level."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return ESCAPES.sub("", super().format(record))


class JsonFormatter(logging.Formatter):
    """One JSON object per record. It has the name of the record's process if there are several."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        process = {"process": part} if (part := getattr(record, "part", "")) else {}
        message = ESCAPES.sub("", super().format(record))
        return json.dumps({"time": time, "level": record.levelname.lower(), **process, "message": message})


def show_messages(log_format: LogFormat | None = None) -> None:
    """Write the messages of this process to standard error: as records in a format, or else plain."""
    root = logging.getLogger()
    for handler in [own for own in root.handlers if isinstance(own, PlainHandler | RecordHandler)]:
        root.removeHandler(handler)
    root.addHandler(RecordHandler(log_format) if log_format else PlainHandler())


def start_log(log_format: LogFormat | None) -> None:
    """Write records from now on if there is a format, or if standard error is not a terminal. Exceptions that
    nobody catches, and warnings of Python, are records too."""
    if log_format is None and sys.stderr.isatty():
        return
    show_messages(log_format or "text")
    logging.captureWarnings(True)
    sys.excepthook = lambda *error: logger.error("uncaught exception", exc_info=error)
    os.environ["TQDM_DISABLE"] = "1"  # no progress bars
    for variable in TERMINAL:
        os.environ.pop(variable, None)


def writes_records() -> bool:
    """Return True if the messages of this process have a time and a level."""
    return any(isinstance(handler, RecordHandler) for handler in logging.getLogger().handlers)


def adopt_transformers() -> None:
    """Have transformers write records as coordexp does, and draw no progress bars, if this process has a log."""
    if not writes_records():
        return
    from transformers.utils import logging as its_logging

    its_logging.disable_progress_bar()
    its_logging.disable_default_handler()
    its_logging.enable_propagation()
