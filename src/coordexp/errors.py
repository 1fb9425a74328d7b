"""Errors that a command tells without a traceback. Imports nothing, so that every module and every command can."""


class DataError(ValueError):
    """Something about the data that only its owner can mend."""


class EngineError(RuntimeError):
    """A rollout engine that could not be started, or failed."""
