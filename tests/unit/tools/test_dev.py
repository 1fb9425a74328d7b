"""`./dev` prepares the environment and runs its tools. Here, a fake `.ci/env` names a folder with fake tools."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FAKE_TOOL = '#!/bin/sh\necho "fake $(basename "$0") $*"\necho "PYTHONPATH=$PYTHONPATH"\n'


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with `dev`, a fake `.ci/env`, and an environment of fake tools."""
    checkout, tools = tmp_path / "a checkout", tmp_path / "env/bin"
    (checkout / ".ci").mkdir(parents=True)
    tools.mkdir(parents=True)
    shutil.copy(ROOT / "dev", checkout)
    scripts = {checkout / ".ci/env": f'#!/bin/sh\necho building\necho "{tools.parent}"\n'}
    scripts |= {tools / name: FAKE_TOOL for name in ("ruff", "mypy", "python", "shell")}
    for file, text in scripts.items():
        file.write_text(text)
        file.chmod(0o755)
    return checkout


def dev(checkout, *arguments):
    env = os.environ | {"SHELL": "shell"}
    return subprocess.run([checkout / "dev", *arguments], capture_output=True, text=True, env=env, cwd="/")


def test_check_runs_style_and_types_and_reports_a_failure_after_all_of_them(checkout):
    shown = dev(checkout, "check").stdout.splitlines()[::2]
    assert shown == ["fake ruff check .", "fake ruff format --check .", "fake mypy "]
    (checkout.parent / "env/bin/ruff").write_text("#!/bin/sh\nexit 1\n")
    failed = dev(checkout, "check")
    assert failed.returncode == 1 and "fake mypy" in failed.stdout


def test_test_runs_the_fast_tests_or_those_that_are_named(checkout):
    assert dev(checkout, "test").stdout.splitlines()[0] == "fake python -m pytest tests/unit tests/property"
    assert dev(checkout, "test", "tests/x y").stdout.splitlines()[0] == "fake python -m pytest tests/x y"


def test_an_unknown_task_lists_the_tasks_and_exits_2(checkout):
    done = dev(checkout, "tset")
    assert done.returncode == 2
    assert 'no task "tset"' in done.stderr and "./dev test [PATHS]" in done.stderr
    assert dev(checkout, "help").stdout in done.stderr
