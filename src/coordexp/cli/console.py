"""What commands print: to a terminal in colour, to a pipe as plain lines that are never wrapped."""

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from coordexp.config import ConfigError, dotted

out = Console(soft_wrap=True, highlight=False)
err = Console(soft_wrap=True, highlight=False, stderr=True)


def print_violations(error: ConfigError, file: str, console: Console) -> None:
    """One block a violation: the place and the problem, then the way out."""
    for violation in error.violations:
        line = Text()
        if violation.path:
            line.append(dotted(violation.path), style="bold")
            line.append(": ")
        line.append(violation.problem, style="red")
        if violation.origin:
            line.append(f"  {violation.origin}", style="dim")
        console.print(line)
        console.print(Text(f"  {violation.fix}", style="green"))
    count = len(error.violations)
    console.print(Text(f"{file}: {count} problem{'s' if count > 1 else ''}", style="bold red"))


def progress(message: str) -> AbstractContextManager[object]:
    """A spinner on a terminal; in a log, the message once."""
    if err.is_terminal:
        return err.status(message)
    err.print(message)
    return nullcontext()


def need(*packages: str, extra: str) -> None:
    """Stops unless the packages of an extra are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        stop(f"this command needs {' and '.join(missing)}\n  pip install 'coordexp[{extra}]'")


def stop(message: str) -> NoReturn:
    err.print(message, markup=False, style="red")
    raise typer.Exit(1)
