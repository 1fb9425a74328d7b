"""Output of commands: in colour on a terminal, and as plain lines that are never wrapped in a pipe."""

import json
import logging
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from coordexp.errors import ConfigError, Finding, UserError, need_packages
from coordexp.files import is_free
from coordexp.logs import FORMAT, LogFormat, logger, say, writes_records
from coordexp.tasks import TELL_EVERY_S, describe_progress, ignore, remind

COLOURS = {"error": "red", "warning": "yellow", "note": "yellow"}
LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "note": logging.INFO}
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
LogOption = Annotated[
    LogFormat | None,
    typer.Option(
        envvar=FORMAT,
        show_default=False,
        help="Write lines with a time and a level, without progress bars. Unset: text, outside a terminal.",
    ),
]

out = Console(soft_wrap=True, highlight=False)
err = Console(soft_wrap=True, highlight=False, stderr=True)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print one block per finding to standard output."""
    for finding in findings:
        out.print(format_finding(finding))


def log_findings(findings: Sequence[Finding]) -> None:
    """Show one message per finding."""
    for finding in findings:
        logger.log(LEVELS[finding.severity], format_finding(finding))


def format_finding(finding: Finding) -> Text:
    """Return the severity of a finding, its subject and the problem, and below them the fix and the places."""
    line = Text(finding.severity, style=f"bold {COLOURS[finding.severity]}")
    line.append(f" {finding.subject}" if finding.subject else "", style="bold").append(": ")
    line.append(finding.problem, style=COLOURS[finding.severity])
    line.append(f" ({finding.count:,})" if finding.count > 1 else "")
    for place in finding.places:
        line.append("" if place.detail else f"  {place}", style="dim")
    lines = [line, *([Text(f"  {finding.fix}", style="green")] if finding.fix else [])]
    for place in finding.places:
        if place.detail:
            lines.append(Text(f"  {replace(place, detail=sanitize(place.detail))}", style="dim"))
    return Text("\n").join(lines)


def count_problems(error: ConfigError) -> Text:
    """Return the file of a config that cannot be used, and the number of its problems."""
    count = len(error.findings)
    return Text(f"{error.file}: {count} problem{'s' if count > 1 else ''}", style="bold red")


def print_json(checked: str, findings: Sequence[Finding], details: dict[str, Any]) -> None:
    """Print the result of a check as one JSON object. All commands that check something have this form."""
    report = {
        "ok": not any(finding.severity == "error" for finding in findings),
        "checked": checked,
        "findings": [asdict(finding) for finding in findings],
        "details": details,
    }
    typer.echo(json.dumps(report, indent=2))


@contextmanager
def progress(message: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on a terminal; in a log, print the message once. Yield a function that adds a detail to the
    spinner."""
    if writes_records() or not err.is_terminal:
        say(message)
        yield ignore
        return
    with err.status(message) as status:

        def show(detail: str) -> None:
            status.update(f"{message}: {detail}")

        yield show


@contextmanager
def bar(message: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
    """Show a progress bar on a terminal; in a log, print the message, and how far it is now and then.
    Yield a function that advances the bar by one, or to the number that it gets."""
    with Progress(console=err, transient=True, disable=not err.is_terminal) as display:
        task = display.add_task(message, total=total, completed=done)

        def advance(to: int | None = None) -> None:
            display.update(task, completed=to, advance=1 if to is None else None)

        if err.is_terminal:
            yield advance
            return

        def describe(seconds: float) -> str:
            now = int(display.tasks[0].completed)
            return describe_progress(message, now, total, (now - done) / seconds)

        say(message)
        with remind(say, describe, TELL_EVERY_S):
            yield advance


@contextmanager
def interruptible(describe: Callable[[], str]) -> Iterator[None]:
    """End the command if Ctrl-C or SIGTERM interrupts it in this context. `describe` returns what was done until
    then, and how to go on."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except KeyboardInterrupt as interruption:
        err.print(describe(), markup=False)
        raise typer.Exit(143 if interruption.args else 130) from None


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def sanitize(text: str) -> str:
    """Return text from data in a form that is safe to print: at most 160 characters, and none that steer a
    terminal."""
    text = text if len(text) <= 160 else f"{text[:157]}..."
    return "".join(character if character.isprintable() else "?" for character in text)


def escape(text: str) -> str:
    """Return a message with escapes in place of characters that steer a terminal, which names in data may have."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def shorten(text: str, most: int = 1000) -> str:
    """Return the text without its middle, if it is longer than a message should be."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def need_new(folder: Path) -> None:
    """Raise unless the folder is new or empty."""
    if not is_free(folder):
        raise UserError(f"{folder} exists and is not an empty folder", "give another one, or remove it")


def need_new_file(file: Path) -> None:
    """Raise if the file exists: no command overwrites data."""
    if file.exists():
        raise UserError(f"{file} exists", "give another file, or remove it")


def need_page(file: Path, option: str = "--out") -> None:
    """Raise unless the name of the file is that of an HTML page. `option` is the one that gives it."""
    if file.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"{file}: a page is an .html file", f"give e.g. {option} {file.with_suffix('.html')}")


def refuse_without_effect(context: typer.Context, form: str, effective: Collection[str]) -> None:
    """Raise if the user gave an option that has no effect for this format. `effective` names those that have."""
    for item in context.command.params:
        origin = context.get_parameter_source(str(item.name))
        is_given = item.param_type_name == "option" and origin is not None and origin.name == "COMMANDLINE"
        if is_given and item.name not in (*effective, "target"):
            raise UserError(f"{item.opts[0]} has no effect for {form}", "leave it out")


def need(*packages: str, extra: str) -> None:
    """Raise unless these packages, which belong to an extra of coordexp, are installed."""
    need_packages("this command", *packages, extra=extra)
