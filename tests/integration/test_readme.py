"""The README is correct: its commands run, and its terminal blocks show real output."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path("README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def ladder() -> list[str]:
    (steps,) = [block for block in blocks("bash") if "coordexp --version" in block]
    return steps.strip().splitlines()


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_every_step_of_the_ladder_works(tmp_path):
    steps = ladder()
    assert len(steps) == 6
    for step in steps:
        command = shlex.split(step.replace("demo-model", str(tmp_path / "demo-model")))
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, f"{step}\n{result.stdout}\n{result.stderr}"
    assert "vLLM and transformers agree on all 16 tokens" in result.stdout


def test_the_detector_of_the_first_screen_finds_the_objects_of_the_scene():
    """The scene has a yellow triangle, a red circle and a purple square."""
    example, _ = blocks("python")
    assert example in Path("docs/detector.md").read_text()
    run = [sys.executable, "-c", example]
    shown = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split(" (")[0] for line in shown] == ["yellow triangle", "red circle", "purple square"]


def test_the_python_example_prints_what_the_text_says(tmp_path, lively_model):
    _, example = blocks("python")
    (tmp_path / "demo-model").symlink_to(lively_model)
    run = [sys.executable, "-c", example]
    result = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, check=True)
    roles = [line.split()[-2] for line in result.stdout.splitlines()]
    targets = [line.split()[-1] for line in result.stdout.splitlines() if "matched_coord" in line]
    assert targets == ["10", "10", "110", "110"]
    assert roles.count("tail_coord") == 4
    assert roles[-1] == "end_of_turn"
    assert "tail_desc" in roles


def test_terminal_blocks_are_what_the_command_prints():
    (block,) = blocks("console")
    command, _, shown = block.partition("\n")
    result = subprocess.run(shlex.split(command.removeprefix("$ ")), capture_output=True, text=True)
    assert result.returncode == 2
    assert shown == result.stdout, "stale: run python tools/readme.py"


def test_the_tree_names_existing_files_and_every_folder_at_the_top():
    (tree,) = blocks("text")
    names = [line.split()[0] for line in tree.splitlines() if not line.startswith(" ")]
    for name in names:
        assert Path(name).exists(), name
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    folders = {name.split("/")[0] for name in tracked if "/" in name} - {".github", ".ci"}
    assert folders <= {name.split("/")[0] for name in names}


def test_links_lead_to_existing_files():
    for target in re.findall(r"\]\(([^)#:]+)[)#]", README):
        assert Path(target).exists(), target
