"""Errors that a user can fix, and findings of checks. `coordexp.cli` prints both, each in one place.

This module imports nothing of coordexp, so every package and every command may import it.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


class UserError(Exception):
    """A problem and what to do about it. `fix` is empty where the problem itself says what to do."""

    def __init__(self, problem: str, fix: str = "") -> None:
        Exception.__init__(self, problem, fix)  # not OSError's, which would take them for errno and strerror
        self.problem, self.fix = problem, fix

    def __str__(self) -> str:
        return f"{self.problem}\n  {self.fix}" if self.fix else self.problem


class DataError(UserError, ValueError):
    """A problem in the user's data or files."""


class StoreError(UserError):
    """A file system or an object store did not answer. That says nothing about the data, so this is neither a
    DataError nor an OSError, which are taken for problems of the image that was read."""


class EngineError(UserError, RuntimeError):
    """A rollout engine or server could not be started, or failed."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, and what is wrong there. `line` is None for the file as a whole."""

    file: str
    line: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{where}: {self.detail}" if self.detail else where


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check of a config, of records, of packages or of a machine, and what to do about it.

    `subject` is the setting, the option, the package, the check or the kind of problem. `count` says how often the
    problem occurs, and `places` are the first occurrences, with their file."""

    severity: Severity
    subject: str
    problem: str
    fix: str = ""
    count: int = 1
    places: tuple[Place, ...] = ()

    def __str__(self) -> str:
        subject = f"{self.subject}: " if self.subject else ""
        places = "".join(f"  ({place})" for place in self.places)
        fix = f"\n  {self.fix}" if self.fix else ""
        return f"{subject}{self.problem}{places}{fix}"


class ConfigError(UserError):
    """All problems of a config or a command line at once, so that the user can fix them in one go. `file` is the
    config."""

    def __init__(self, findings: Sequence[Finding], file: str = "") -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings, self.file = tuple(findings), file


def need_packages(subject: str, *packages: str, extra: str | None = None) -> None:
    """Raise UserError unless these packages are installed. `extra` is the one of coordexp that they belong to.
    `subject` is what needs them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        fix = pip_install(extra) if extra else f"pip install {' '.join(missing)}"
        raise UserError(f"{subject} needs {' and '.join(missing)}", fix)


def pip_install(extra: str) -> str:
    """Return how to install coordexp with an extra, for a message. It is in no package index yet."""
    return f"in a clone of coordexp: pip install '.[{extra}]'"


@contextmanager
def explain(
    kinds: type[Exception] | tuple[type[Exception], ...],
    problem: str,
    fix: str = "",
    *,
    to: Callable[[str, str], UserError] = DataError,
) -> Iterator[None]:
    """Replace an exception of these kinds with a UserError: the problem, what the exception says, and the fix."""
    try:
        yield
    except kinds as error:
        raise to(f"{problem}: {describe_exception(error)}", fix) from error


@contextmanager
def explain_value_errors() -> Iterator[None]:
    """Raise a ValueError that is not a UserError as one. transformers and vLLM refuse settings and models with a
    ValueError, in words for the user."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error


def describe_exception(error: Exception) -> str:
    """Return what an exception says, without the number and the path that an OSError adds. A KeyError says only
    the key, so its name is added."""
    if isinstance(error, LookupError):
        return repr(error)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
