"""The README and the pages that it leads to first are correct: their commands run, and their terminal blocks show
real output."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import zygote

MOST_LINES = 120


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", Path(page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_is_a_landing_page():
    assert len(Path("README.md").read_text().splitlines()) <= MOST_LINES


def test_the_quickstart_makes_a_page_with_detections(tmp_path):
    (install, *steps) = blocks("README.md", "bash")[0].strip().splitlines()
    assert install.startswith("pip install") and len(steps) <= 4
    (tmp_path / "examples").symlink_to(Path("examples").absolute())
    for step in steps:
        result = zygote.run(["-m", *shlex.split(step)], cwd=tmp_path)
        assert result.returncode == 0, f"{step}\n{result.stdout}\n{result.stderr}"
    assert "all 24 images" in (tmp_path / "found.html").read_text()


@pytest.mark.full
@pytest.mark.cold
@pytest.mark.engine
@pytest.mark.timeout(400)
def test_every_step_of_the_ladder_works(tmp_path):
    (ladder,) = [block for block in blocks("docs/install.md", "bash") if "coordexp --version" in block]
    steps = ladder.strip().splitlines()
    assert len(steps) == 6
    for step in steps:
        command = shlex.split(step.replace("demo-model", str(tmp_path / "demo-model")))
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, f"{step}\n{result.stdout}\n{result.stderr}"
    assert "all checks passed" in result.stdout


def test_the_detector_of_the_first_screen_finds_the_objects_of_the_scene():
    """The scene has a yellow triangle, a red circle and a purple square."""
    (example,) = blocks("README.md", "python")
    assert example in Path("docs/detector.md").read_text()
    shown = zygote.run(["-c", example], cwd=Path.cwd(), check=True).stdout.splitlines()
    assert [line.split(" (")[0] for line in shown] == ["yellow triangle", "red circle", "purple square"]


def test_the_python_example_prints_what_the_text_says(tmp_path, lively_model):
    (example,) = blocks("docs/correction.md", "python")
    (tmp_path / "demo-model").symlink_to(lively_model)
    result = zygote.run(["-c", example], cwd=tmp_path, check=True)
    roles = [line.split()[-2] for line in result.stdout.splitlines()]
    targets = [line.split()[-1] for line in result.stdout.splitlines() if "matched_coord" in line]
    assert targets == ["10", "10", "110", "110"]
    assert roles.count("tail_coord") == 4
    assert roles[-1] == "end_of_turn"
    assert "tail_desc" in roles


def test_terminal_blocks_are_what_the_command_prints():
    (block,) = blocks("docs/checks.md", "console")
    command, _, shown = block.partition("\n")
    result = subprocess.run(shlex.split(command.removeprefix("$ ")), capture_output=True, text=True)
    assert result.returncode == 2
    assert shown == result.stdout, "stale: run python tools/terminal_blocks.py"


def test_the_tree_names_existing_files_and_every_folder_at_the_top():
    (tree,) = blocks("CONTRIBUTING.md", "text")
    names = [line.split()[0] for line in tree.splitlines() if not line.startswith(" ")]
    for name in names:
        assert Path(name).exists(), name
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    folders = {name.split("/")[0] for name in tracked if "/" in name} - {".github", ".ci"}
    assert folders <= {name.split("/")[0] for name in names}
