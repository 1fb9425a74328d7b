"""`./dev` prepares the environment and runs its tools. Here, a fake `.ci/env` names a folder with fake tools."""

import os
import shutil
import subprocess
import sys
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
    command = dev(checkout, "test").stdout
    assert command.startswith("fake python -m pytest tests/property tests/unit -m not slow and not engine ")
    assert dev(checkout, "test", "tests/x y").stdout.splitlines()[0] == "fake python -m pytest tests/x y"


def test_changed_runs_the_fast_tests_that_import_what_changed(checkout):
    """`python` is a real one here that runs everything but pytest."""
    python = checkout.parent / "env/bin/python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] && echo "fake $*" || exec {sys.executable} "$@"\n')
    files = {
        "src/coordexp/shapes/__init__.py": (
            "from coordexp.shapes.area import area\nfrom coordexp.shapes.draw import draw\n"
        ),
        "src/coordexp/shapes/area.py": "area = 1\n",
        "src/coordexp/shapes/draw.py": "draw = 2\n",
        "src/coordexp/report.py": "from coordexp.shapes import area\n",
        "tests/unit/test_area.py": "from coordexp.shapes import area\n",
        "tests/unit/test_draw.py": "from coordexp.shapes import draw\n",
        "tests/unit/test_report.py": "import coordexp.report\n",
        "src/coordexp/cli.py": "import coordexp.shapes.area\n",
        "tests/command.py": "import coordexp.cli\n",
        "tests/unit/test_command.py": "from tests.command import run\n",
        "tests/unit/test_config.py": 'NAME = "small.yaml"\n',
        "tests/integration/test_all.py": "from coordexp.shapes import area\n",
    }
    for name, text in files.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    shutil.copy(ROOT / "tests/changed.py", checkout / "tests")
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-qb", "main"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    assert dev(checkout, "test", "--changed").stdout == "Your change concerns none of the fast tests.\n"
    (checkout / "src/coordexp/shapes/area.py").write_text("area = 3\n")
    (checkout / "small.yaml").write_text("new: true\n")
    shown = dev(checkout, "test", "--changed").stdout.splitlines()
    concerned = [f"tests/unit/test_{name}.py" for name in ("area", "command", "config", "report")]
    assert shown[:-1] == concerned and shown[-1].startswith(f"fake -m pytest {' '.join(concerned)} -m not slow")
    subprocess.run([*git, "commit", "-qam", "second"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    assert "test_area" not in dev(checkout, "test", "--changed").stdout
    assert "test_area" in dev(checkout, "test", "--changed", "HEAD~1").stdout


def test_an_unknown_task_lists_the_tasks_and_exits_2(checkout):
    done = dev(checkout, "tset")
    assert done.returncode == 2
    assert 'no task "tset"' in done.stderr and "./dev test PATHS" in done.stderr
    assert dev(checkout, "help").stdout in done.stderr
