"""The wording of messages, in one place: `tests/messages.txt` has what every case of this package says.

A module has cases of one package. A case provokes an error, or returns what is printed or reported:

    @provoke({"question": ""}, {"answer": 3})
    def a_chat_record(folder, line):
        parse_any_record(json.dumps(line))

It is called once for each value, with an empty folder. `tests/unit/test_messages.py` compares, and writes the file
anew with COORDEXP_UPDATE_MESSAGES=1. Other tests assert on values, places, subjects and codes.
"""

import importlib
import io
import pkgutil
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from coordexp.errors import UserError

SNAPSHOT = Path(__file__).parent.with_suffix(".txt")
CASES: dict[str, Callable[[Path], object]] = {}


def provoke(*values: object) -> Callable:
    """Add a case for each value, or one that gets only the folder."""

    def add(case: Callable) -> Callable:
        area = case.__module__.rpartition(".")[2]
        name = f"{area}: {case.__name__.replace('_', ' ')}"
        if not values:
            CASES[name] = case
        for value in values:
            key = f"{name} {value!r}"
            assert key not in CASES, key
            CASES[key] = lambda folder, value=value: case(folder, value)
        return case

    return add


def load_cases() -> dict[str, Callable[[Path], object]]:
    """Return the cases of all modules of this package by their names."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return CASES


def say(case: Callable[[Path], object], folder: Path) -> str:
    """Return what a case prints and returns, or its exception with its kind. The folder has no name in it."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            returned = case(folder)
    except (UserError, ValueError) as error:
        returned = f"{type(error).__name__}: {error}"
    listed = isinstance(returned, Iterable) and not isinstance(returned, str)
    said = "\n".join(map(str, returned)) if listed else str(returned or "")
    return (printed.getvalue() + said).replace(str(folder), "FOLDER").strip()


def render(said: dict[str, str]) -> str:
    """Return the text of the snapshot file, in which messages are indented below their cases."""
    lines = []
    for name in sorted(said):
        lines += [name, *(f"    {line}".rstrip() for line in said[name].splitlines()), ""]
    return "\n".join(lines)


def read_snapshot() -> dict[str, str]:
    """Return the messages of the snapshot file by their cases."""
    messages: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in SNAPSHOT.read_text().splitlines():
        if line and not line.startswith("    "):
            lines = messages[line] = []
        else:
            lines.append(line.removeprefix("    "))
    return {name: "\n".join(lines).strip() for name, lines in messages.items()}
