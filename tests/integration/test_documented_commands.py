"""Every block of commands in the documentation is run by a test, or says above it why not:
`<!-- not run: needs a GPU -->`."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.documented_commands import ROOT, find_blocks, find_pages
from tests.source import SOURCE

# Pages whose blocks another test runs.
ELSEWHERE = {
    "README.md": "tests/integration/test_readme.py",
    "docs/install.md": "tests/integration/test_readme.py",
    "docs/missing-labels.md": "tests/integration/test_missing_labels.py",
    "docs/requests.md": "tests/integration/test_examples.py",
    "docs/answer-formats.md": "tests/integration/test_examples.py",
    "examples/scenes-cpu/README.md": "tests/integration/test_examples.py",
    "examples/stage2-cpu/README.md": "tests/integration/test_examples.py",
}
STEPS = "--set training.max_steps=4 --set training.eval_steps=4 --set training.save_steps=4"
COCO, STAGE2 = (f"coordexp train --config configs/demo/{name}.yaml" for name in ("coco-cpu", "stage2-hf"))
# Texts in the commands of a page, and what to run instead, so that they take seconds.
SMALLER = {
    "docs/tutorials/coco.md": {
        "--train 1500": "--train 40",
        "--val 200": "--val 8",
        COCO: f"{COCO} {STEPS}",
        "checkpoint-200": "checkpoint-4",
    },
    "docs/tutorials/stage2.md": {"--train 600 --val 240": "--train 24 --val 4", STAGE2: f"{STAGE2} {STEPS}"},
    "docs/tutorials/servers.md": {"--train 600 --val 240": "--train 24 --val 4"},
}
RUN_HERE = [
    page
    for page in find_pages()
    if page not in ELSEWHERE and any(block.reason is None for block in find_blocks(page))
]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUN_HERE)
def test_the_commands_of_a_page_run_in_their_order(page, tmp_path):
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    for block in find_blocks(page):
        if block.reason is None:
            script = block.text
            for full, reduced in SMALLER.get(page, {}).items():
                script = script.replace(full, reduced)
            command = ["bash", "-euo", "pipefail", "-c", script]
            result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert result.returncode == 0, f"{block}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


def test_what_is_run_elsewhere_is_named_there():
    for page, test in ELSEWHERE.items():
        assert any(block.reason is None for block in find_blocks(page)), f"{page} has nothing to run"
        assert page in Path(ROOT, test).read_text(), f"{test} does not name {page}"


def test_reductions_are_of_texts_that_the_pages_have():
    for page, texts in SMALLER.items():
        script = "\n".join(block.text for block in find_blocks(page) if block.reason is None)
        assert [text for text in texts if text not in script] == []
