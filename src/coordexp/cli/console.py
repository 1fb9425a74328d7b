"""What commands print: to a terminal in colour, to a pipe as plain lines that are never wrapped."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from coordexp.config import ConfigError, dotted
from coordexp.errors import UserError
from coordexp.folders import is_free

out = Console(soft_wrap=True, highlight=False)
err = Console(soft_wrap=True, highlight=False, stderr=True)


def print_violations(error: ConfigError, console: Console) -> None:
    """Print one block per violation: the setting and the problem, then the fix."""
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
    console.print(Text(f"{error.file}: {count} problem{'s' if count > 1 else ''}", style="bold red"))


def progress(message: str) -> AbstractContextManager[object]:
    """A spinner on a terminal; in a log, the message once."""
    if err.is_terminal:
        return err.status(message)
    err.print(message)
    return nullcontext()


@contextmanager
def bar(message: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error; what comes back moves it by one. In a log, the message once."""
    with Progress(console=err, transient=True, disable=not err.is_terminal) as shown:
        task = shown.add_task(message, total=total, completed=done)
        if not err.is_terminal:
            err.print(message)
        yield lambda: shown.advance(task)


@contextmanager
def telling(message: str) -> Iterator[Callable[[str], None]]:
    """A spinner whose message goes on with what it is told; in a log, the message once."""
    if not err.is_terminal:
        err.print(message)
        yield lambda more: None
        return
    with err.status(message) as status:
        yield lambda more: status.update(f"{message}: {more}")


def printable(text: str) -> str:
    """Text from data, without what could steer a terminal, and not endless."""
    text = text if len(text) <= 160 else f"{text[:157]}..."
    return "".join(character if character.isprintable() else "?" for character in text)


def need_new(folder: Path) -> None:
    """Stops unless the folder is new or empty."""
    if not is_free(folder):
        stop(f"{folder} exists and is not an empty folder\n  give another one, or remove it")


def need_page(file: Path) -> None:
    """Stops unless the file is named as a page."""
    if file.suffix.lower() not in (".html", ".htm"):
        stop(f"{file}: a page is an .html file\n  give e.g. --out {file.with_suffix('.html')}")


def need(*packages: str, extra: str) -> None:
    """Stops unless the packages of an extra are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        stop(f"this command needs {' and '.join(missing)}\n  pip install 'coordexp[{extra}]'")


def stop(problem: str, fix: str = "") -> NoReturn:
    """End the command with exit code 1 and this message."""
    raise UserError(problem, fix)
