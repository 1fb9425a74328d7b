"""Errors that a user can fix. `coordexp.cli.Commands` prints them without a traceback, in one place.

This module imports nothing, so every package and every command may import it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A problem and what to do about it. `fix` is empty where the problem itself says what to do."""

    def __init__(self, problem: str, fix: str = "") -> None:
        Exception.__init__(self, problem, fix)  # not OSError's, which would take them for errno and strerror
        self.problem, self.fix = problem, fix

    def __str__(self) -> str:
        return f"{self.problem}\n  {self.fix}" if self.fix else self.problem


class DataError(UserError, ValueError):
    """A problem in the user's data or files."""


class EngineError(UserError, RuntimeError):
    """A rollout engine or server could not be started, or failed."""


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
