"""Configuration: read YAML and return frozen, validated settings. Imports neither torch nor transformers.

The launcher, the trainer and `coordexp check` all call `load_settings`, so the same rules hold everywhere.
"""

from coordexp.config.load import Loaded, load_settings, parse_settings
from coordexp.config.rollout import RolloutContract, RolloutMatching
from coordexp.config.rules import World
from coordexp.config.settings import Settings
from coordexp.config.yaml_tree import KeyPath, format_path
from coordexp.errors import ConfigError

__all__ = [
    "ConfigError",
    "KeyPath",
    "Loaded",
    "RolloutContract",
    "RolloutMatching",
    "Settings",
    "World",
    "format_path",
    "load_settings",
    "parse_settings",
]
