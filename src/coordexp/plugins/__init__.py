"""Files that other programs load by their path. The folder holds nothing else, because such a program may put it
on its import path."""

from pathlib import Path

SWIFT_REPEAT_GUARD = Path(__file__).with_name("swift_repeat_guard.py")  # for `swift rollout --external_plugins`
