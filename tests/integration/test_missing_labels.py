"""The worked example of docs/missing-labels.md: its commands run one after the other, and its figures are true."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from coordexp.data import Record, read_records
from tests import zygote
from tests.source import SOURCE

ROOT = SOURCE.parent
PAGE = (ROOT / "docs/missing-labels.md").read_text()
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run all blocks of the page in a new folder. Return the folder and everything that was printed."""
    folder = tmp_path_factory.mktemp("example")
    for name in ("examples", "tools"):
        (folder / name).symlink_to(ROOT / name)
    printed = ""
    for language, block in BLOCK.findall(PAGE):
        commands = [["-c", block]] if language == "python" else map(split, block.splitlines())
        for command in commands:
            environment = os.environ | {"PYTHONPATH": str(SOURCE)}
            result = zygote.run(command, cwd=folder, env=environment)
            assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
            printed += result.stdout
    return folder, printed


def split(line: str) -> list[str]:
    program, *words = shlex.split(line)
    return [*(["-m", "coordexp"] if program == "coordexp" else []), *words]


def read(file: Path) -> list[Record]:
    return [record for _, record in read_records(file)]


def test_the_commands_print_what_the_page_says(example: tuple[Path, str]) -> None:
    _, printed = example
    shown = re.search(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown
    for line in shown[1].splitlines():
        assert line in printed.splitlines()


def test_accepted_labels_are_added_and_nothing_else_changes(example: tuple[Path, str]) -> None:
    folder, _ = example
    incomplete, completed = (read(folder / f"scenes/{name}.jsonl") for name in ("incomplete", "completed"))
    added = 0
    for before, after in zip(incomplete, completed, strict=True):
        assert before.image == after.image
        assert [item for item in after.objects if item in before.objects] == list(before.objects)
        added += len(after.objects) - len(before.objects)
    lines = (folder / "suggestions/suggestions.jsonl").read_text().splitlines()
    assert added == sum(json.loads(line)["score"] >= 0.9 for line in lines) > 20


def test_what_goes_to_label_studio_comes_back(example: tuple[Path, str]) -> None:
    folder, _ = example
    incomplete, reviewed = (read(folder / f"scenes/{name}.jsonl") for name in ("incomplete", "reviewed"))
    assert reviewed == incomplete
