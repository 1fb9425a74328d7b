"""Files that other programs load by their path. There is nothing else in this folder, because such a program may
add it to its import path."""

from pathlib import Path

SWIFT_REPEAT_GUARD = Path(__file__).with_name("swift_repeat_guard.py")  # for `swift rollout --external_plugins`
