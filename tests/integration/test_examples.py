"""The commands of the examples and of worked examples in the documentation, at a reduced size."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests import zygote
from tests.documented import find_undocumented_files, find_undocumented_metrics

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.full


def commands(page: str) -> list[str]:
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.strip().splitlines()]


def replace_all(text: str, smaller: dict[str, str]) -> str:
    for large, reduced in smaller.items():
        text = text.replace(large, reduced)
    return text


def run_all(page: str, folder: Path, steps: int, smaller: dict[str, str]) -> list[str]:
    """Run all commands of a page in a folder, and return their outputs. Training is as short as `steps`, and in
    commands and paths of models, the keys of `smaller` are replaced."""
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "examples").symlink_to(ROOT / "examples")
    training = {"max_steps": steps, "save_steps": steps, "eval_steps": steps, "report_to": "none"}
    configs = re.findall(r"--config (\S+)", "\n".join(commands(page)))
    for number, config in enumerate(dict.fromkeys(configs)):
        path = yaml.safe_load((ROOT / config).read_text())["model"]["path"]
        tree = {"extends": [config], "training": training, "model": {"path": replace_all(path, smaller)}}
        (folder / f"small-{number}.yaml").write_text(yaml.safe_dump(tree))
        smaller = smaller | {config: f"small-{number}.yaml"}
    outputs = []
    for command in commands(page):
        words = shlex.split(replace_all(command, smaller))
        assert words[0] == "coordexp"
        done = zygote.run(["-m", *words], cwd=folder)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        outputs.append(done.stdout)
    for metrics in (folder / "runs").glob("*/metrics.jsonl"):
        assert find_undocumented_metrics(metrics.parent) == []
        assert find_undocumented_files(metrics.parent) == []
    return outputs


@pytest.mark.timeout(400)
def test_from_nothing_to_a_measured_model(tmp_path):
    smaller = {"--train 20000 --val 200": "--train 60 --val 6", "checkpoint-7000": "checkpoint-6"}
    outputs = run_all("examples/scenes-cpu/README.md", tmp_path, 6, smaller)
    assert len(outputs) == 7
    assert (tmp_path / "scenes/evaluate.html").is_file()
    assert "f1" in outputs[-1].lower()


@pytest.mark.timeout(400)
def test_from_a_trained_model_to_its_own_answers(tmp_path):
    smaller = {"--train 600 --val 240": "--train 24 --val 4"}
    outputs = run_all("examples/stage2-cpu/README.md", tmp_path, 4, smaller)
    assert re.search(r"step 4/4 .* 16 answers: found \d+ of \d+", outputs[1])
    assert "6 examples of 1 steps come out the same" in outputs[-1]
    assert all((tmp_path / "runs/scenes-stage2" / name).is_file() for name in ("inspect.html", "report.html"))


@pytest.mark.timeout(900)
def test_a_model_learns_lists_of_classes(tmp_path):
    smaller = {"--train 20000 --val 400": "--train 60 --val 6", "--val 400": "--val 6"}
    smaller |= {f"checkpoint-{steps}": "checkpoint-3" for steps in (4500, 4000, 2500)}
    outputs = run_all("docs/requests.md", tmp_path, 3, smaller)
    assert len(outputs) == 9
    assert re.search(r"absent classes +\d", outputs[6]) and "classes asked" in outputs[6]
    assert re.search(r"absent classes +- ", outputs[8]) and "classes asked" not in outputs[8]


@pytest.mark.timeout(400)
def test_native_answers_from_a_random_model_to_a_report(tmp_path):
    smaller = {
        "scenes --out demo-data": "scenes --out demo-data --train 32 --val 4",
        "checkpoint-200": "checkpoint-6",
    }
    outputs = run_all("docs/answer-formats.md", tmp_path, 6, smaller)
    assert len(outputs) == 5
    assert "f1" in outputs[-1].lower()
