"""The version of this package, with the commit that it was made from."""

import subprocess
from contextlib import suppress
from pathlib import Path

from coordexp import __version__

PACKAGE = Path(__file__).parents[1]
COMMIT_FILE = "commit.txt"  # in the package folder; tools/build_hook.py writes it when a wheel is built


def describe_version(package: Path = PACKAGE) -> str:
    """Return the version and, if it is known, the commit: that of the checkout which `package` is in, or the one
    that was noted when the wheel was built."""
    commit = read_commit(package)
    return f"coordexp {__version__}" + (f" (commit {commit})" if commit else "")


def read_commit(package: Path) -> str | None:
    """Return the short commit, with "-changed" if the checkout differs from it, or None if it is not known."""
    checkout = package.parents[1]
    if (checkout / ".git").exists():
        return _ask_git(checkout)
    file = package / COMMIT_FILE
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _ask_git(checkout: Path) -> str | None:
    describe = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=-changed"]
    with suppress(OSError, subprocess.TimeoutExpired):  # no git here, or a very slow disk
        done = subprocess.run(describe, cwd=checkout, capture_output=True, text=True, timeout=5)  # noqa: S603
        return done.stdout.strip() if done.returncode == 0 else None
    return None
