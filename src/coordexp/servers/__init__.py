"""Rollout servers and the backend that asks them: both ends of one wire, around `protocol`."""

from pathlib import Path

# For `swift rollout --external_plugins`. Its folder has nothing else: that program may add it to its import path.
SWIFT_REPEAT_GUARD = Path(__file__).with_name("swift_plugin") / "swift_repeat_guard.py"
