"""Configuration: YAML in, frozen and validated settings out. Imports neither torch nor transformers.

`load_settings` is the one way in. The launcher, the trainer and `coordexp check` all use it, so they see
the same contract.
"""

from coordexp.config.capacity import requests_per_rank
from coordexp.config.load import Loaded, load_settings, parse_settings
from coordexp.config.paths import dotted
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
    "dotted",
    "load_settings",
    "parse_settings",
    "requests_per_rank",
]
