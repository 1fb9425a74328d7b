"""`coordexp --version` names the commit that the code is from, and says nothing about it if it is not known."""

import os
import subprocess
import sys
from pathlib import Path

from coordexp import __version__
from coordexp.cli.version import COMMIT_FILE, describe_version

ROOT = Path(__file__).parents[3]
ROLES = ("AUTHOR_NAME", "AUTHOR_EMAIL", "COMMITTER_NAME", "COMMITTER_EMAIL")


def git(folder: Path, *arguments: str) -> str:
    command, env = (
        ["git", "-C", str(folder), *arguments],
        os.environ | {f"GIT_{role}": "someone" for role in ROLES},
    )
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout.strip()


def make_checkout(folder: Path) -> Path:
    package = folder / "src/coordexp"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return package


def test_the_version_of_a_checkout_names_its_commit_even_if_it_has_tags(tmp_path):
    package = make_checkout(tmp_path)
    git(tmp_path, "tag", "-am", "a tag", "v9")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert describe_version(package) == f"coordexp {__version__} (commit {commit[:12]})"


def test_the_version_of_a_checkout_with_changes_says_so(tmp_path):
    package = make_checkout(tmp_path)
    (package / "__init__.py").write_text("changed = True\n")
    assert describe_version(package).endswith("-changed)")


def test_an_installed_package_names_the_commit_that_was_noted_when_it_was_built(tmp_path):
    package = tmp_path / "site-packages/coordexp"
    package.mkdir(parents=True)
    (package / COMMIT_FILE).write_text("0123456789ab\n")
    assert describe_version(package) == f"coordexp {__version__} (commit 0123456789ab)"


def test_an_installed_package_inside_of_a_repository_does_not_name_the_commit_of_that_repository(tmp_path):
    make_checkout(tmp_path)
    package = tmp_path / ".venv/lib/python3.11/site-packages/coordexp"
    package.mkdir(parents=True)
    assert describe_version(package) == f"coordexp {__version__}"


def test_the_version_is_plain_without_git(tmp_path, monkeypatch):
    package = make_checkout(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_version(package) == f"coordexp {__version__}"


def test_the_version_needs_no_torch_and_little_time_of_the_processor():
    """It takes half a second; a busy machine needs up to three times as long for the same work."""
    code = "import sys; from coordexp.cli import app; app(['--version'], standalone_mode=False)"
    command = [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"]
    before = os.times()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    after = os.times()
    assert done.stdout.splitlines()[-1] == "False"
    assert sum(after[2:4]) - sum(before[2:4]) < 3.0
