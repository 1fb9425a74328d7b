"""Configuration: read YAML and return frozen, validated settings. Imports neither torch nor transformers.

The launcher, the trainer and `coordexp check` all call `load_settings`, so the same rules hold everywhere.
"""

from coordexp.config.capacity import requests_per_rank
from coordexp.config.load import Loaded, load_settings, parse_settings
from coordexp.config.paths import format_path
from coordexp.config.rollout import RolloutContract, RolloutMatching
from coordexp.config.rules import World
from coordexp.config.settings import CHANNELS_OF, Settings
from coordexp.config.violations import ConfigError, Violation

__all__ = [
    "CHANNELS_OF",
    "ConfigError",
    "Loaded",
    "RolloutContract",
    "RolloutMatching",
    "Settings",
    "Violation",
    "World",
    "format_path",
    "load_settings",
    "parse_settings",
    "requests_per_rank",
]
