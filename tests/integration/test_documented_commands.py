"""Every block of commands in the documentation is run by a test, or says above it why not:
`<!-- not run: needs a GPU -->`. What the runs write is documented, too."""

import json
import os
import re
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
}


def shorter(config: str, steps: int, *settings: str) -> dict[str, str]:
    """Return the replacement of a command that trains by one that makes so many steps, with these settings."""
    command = f"coordexp train --config configs/demo/{config}.yaml"
    every = [f"training.{name}={steps}" for name in ("max_steps", "eval_steps", "save_steps")]
    return {command: " --set ".join((command, *every, *settings))}


STAGE2 = shorter("stage2-hf", 4) | {"--train 600 --val 240": "--train 24 --val 4"}
# Texts in the commands of a page, and what to run instead, so that they take seconds.
SMALLER = {
    "docs/answer-formats.md": shorter("stage1-native-cpu", 6)
    | {"--out demo-data": "--out demo-data --train 32 --val 4", "checkpoint-200": "checkpoint-6"},
    "docs/requests.md": shorter("requests-cpu", 3)
    | shorter("requests-single-cpu", 3, "model.path=runs/requests/checkpoint-3")
    | shorter("requests-several-cpu", 3, "model.path=runs/requests-single/checkpoint-3")
    | {"--train 20000 --val 400": "--train 60 --val 6", "--val 400": "--val 6", "checkpoint-4500": "checkpoint-3"},
    "docs/tutorials/coco.md": shorter("coco-cpu", 4)
    | {"--train 1500": "--train 40", "--val 200": "--val 8", "checkpoint-200": "checkpoint-4"},
    "docs/tutorials/servers.md": {"--train 600 --val 240": "--train 24 --val 4"},
    "docs/tutorials/stage2.md": STAGE2,
    "examples/scenes-cpu/README.md": shorter("scenes-cpu", 6)
    | {"--train 20000 --val 200": "--train 60 --val 6", "checkpoint-7000": "checkpoint-6"},
    "examples/stage2-cpu/README.md": STAGE2,
}
# What the commands of a page print.
PRINTED = {
    "docs/requests.md": ("classes asked", r"absent classes +\d", "absent classes +- "),
    "examples/stage2-cpu/README.md": (
        r"step 4/4 .* 16 answers: found \d+ of \d+",
        "6 examples of 1 steps come out",
    ),
}
RUN_HERE = [
    page
    for page in find_pages()
    if page not in ELSEWHERE and any(block.reason is None for block in find_blocks(page))
]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", RUN_HERE)
def test_the_commands_of_a_page_run_in_their_order(page, tmp_path):
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    shown = ""
    for block in find_blocks(page):
        if block.reason is None:
            script = block.text
            for full, reduced in SMALLER.get(page, {}).items():
                script = script.replace(full, reduced)
            command = ["bash", "-euo", "pipefail", "-c", script]
            result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert result.returncode == 0, f"{block}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
            shown += result.stdout + result.stderr
    assert all(re.search(pattern, shown) for pattern in PRINTED.get(page, ())), shown[-3000:]
    for run in (tmp_path / "runs").glob("*/metrics.jsonl"):
        check_documented(run.parent)


def check_documented(run: Path) -> None:
    """Assert that docs/reference names all metrics of a run and all files in its folder and its checkpoints."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    metrics = {name.removesuffix("/mean") for line in lines for name in json.loads(line)}
    paths = (str(file.relative_to(run)) for file in run.rglob("*") if file.is_file())
    files = {re.sub(r"^checkpoint-\d+/", "", path) for path in paths}
    for page, names in (("metrics.md", metrics), ("files.md", files)):
        rows = re.findall(r"^- `([^`]+)`: ", (ROOT / "docs/reference" / page).read_text(), re.MULTILINE)
        known = [re.escape(row).replace("NAME", "[^/]+") for row in rows]  # N is a number, NAME a word
        known = [re.sub(r"(?<![A-Za-z])N(?![A-Za-z])", r"\\d+", pattern) for pattern in known]
        assert not [name for name in names if not any(re.fullmatch(pattern, name) for pattern in known)], page


def test_what_is_run_elsewhere_is_named_there():
    for page, test in ELSEWHERE.items():
        assert any(block.reason is None for block in find_blocks(page)), f"{page} has nothing to run"
        assert page in Path(ROOT, test).read_text(), f"{test} does not name {page}"


def test_reductions_are_of_texts_that_the_pages_have():
    for page, texts in SMALLER.items():
        script = "\n".join(block.text for block in find_blocks(page) if block.reason is None)
        assert [text for text in texts if text not in script] == []
