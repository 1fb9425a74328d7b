"""Errors that a user can fix. `coordexp.cli.Commands` prints them without a traceback, in one place.

This module imports nothing, so every package and every command may import it.
"""


class UserError(Exception):
    """A problem and what to do about it. `fix` is empty where the problem itself says what to do."""

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(problem, fix)
        self.problem, self.fix = problem, fix

    def __str__(self) -> str:
        return f"{self.problem}\n  {self.fix}" if self.fix else self.problem


class DataError(UserError, ValueError):
    """A problem in the user's data or files."""


class EngineError(UserError, RuntimeError):
    """A rollout engine or server could not be started, or failed."""
