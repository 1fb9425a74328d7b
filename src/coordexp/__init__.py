"""Teach a vision-language model to detect objects by training on its own corrected answers."""

from importlib.metadata import version

__version__ = version("coordexp")
