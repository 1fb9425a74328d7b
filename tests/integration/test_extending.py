"""The package on the page docs/extending.md, written to a folder as an installer would, adds all of its parts."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from PIL import Image

from tests import zygote
from tests.command import run
from tests.integration.stage2_runs import MODEL, ROOT, config, draw, steps
from tests.source import SOURCE

# Started anew: the process that tests fork has looked for other packages before this one was there.
pytestmark = [pytest.mark.cold, pytest.mark.timeout(300)]

PAGE = (ROOT / "docs/extending.md").read_text()
IMPORT_ALONE = """
import my_package.settings
from pydantic import TypeAdapter, ValidationError
from coordexp.config.sections import Module
declared = dict(name="sharpness", enabled=True, weight=1.0, channels=["A"], config={"entropy_weight": 1.0})
form = TypeAdapter(Module)
config = form.validate_python(declared).config
assert (config.entropy_weight, config.answer_format, config.is_diagnostic) == (1, "coord_tokens", False)
try:
    form.validate_python(declared | {"config": {"entropy_weight": 1.0, "other": 1}})
except ValidationError as error:
    print(error)
"""
PASCAL = """<annotation><filename>a.png</filename><size><width>40</width><height>30</height></size>
<object><name>cup</name><bndbox><xmin>4</xmin><ymin>5</ymin><xmax>20</xmax><ymax>21</ymax></bndbox></object>
</annotation>"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def install(folder: Path) -> None:
    """Write the modules of the page, and the metadata that pip would write."""
    for block in blocks("python"):
        path = folder / block.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(block)
    (project,) = blocks("toml")
    groups = tomllib.loads(project)["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in entries.items())
        for group, entries in groups.items()
    ]
    metadata = folder / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("extending")
    install(folder)
    return folder


def coordexp(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command where the package is installed."""
    paths = f"{folder}:{SOURCE}"
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | variables
    return zygote.run(["-m", "coordexp", *words], env=environment, cwd=folder, timeout=250)


def test_a_loss_module_a_correction_policy_and_a_rollout_backend_of_another_package_serve_a_run(folder):
    draw(folder)
    records = [json.loads(line) for line in (folder / "data/train.jsonl").read_text().splitlines()]
    coords = ", ".join(f'"<|coord_{bin}|>"' for bin in (0, 0, 4, 4))  # too small to match anything
    extra = f'{{"object_1": {{"desc": "speck", "bbox_2d": [{coords}]}}}}'
    answers = {
        Path(record["images"][0] if "images" in record else record["image"]).name: extra for record in records
    }
    (folder / "answers.json").write_text(json.dumps(answers))
    (declared,) = yaml.safe_load(blocks("yaml")[0])
    changes = {
        "rollout_matching__rollout_backend": "recorded",
        "training__max_steps": 2,
        "training__save_steps": 2,
    }
    file = config(folder, "run", **changes)
    tree = yaml.safe_load(file.read_text())
    tree["rollout_matching"]["pipeline"]["objective"].append(declared)
    tree["rollout_matching"] |= yaml.safe_load(blocks("yaml")[1])
    file.write_text(yaml.safe_dump(tree))
    run = coordexp(folder, "train", "--config", str(file), RECORDED_ANSWERS=str(folder / "answers.json"))
    assert run.returncode == 0, run.stderr
    lines = steps(folder / "run")
    assert len(lines) == 2
    assert all(line["sharpness/entropy"] > 0 for line in lines)
    assert all(line["match/matched"] == 0 and line["match/recall"] == 0 for line in lines), "no answer is right"
    assert all(line["target/extras_removed"] == line["rollout/answers"] > 0 for line in lines), "by the policy"
    assert json.loads((folder / "run/run.json").read_text())[0]["rollouts"]["backend"] == "recorded"


def test_the_settings_of_an_added_module_can_be_imported_alone_and_refuse_unknown_keys(folder):
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALONE],
        env=os.environ | {"PYTHONPATH": f"{folder}:{SOURCE}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert "other" in run.stdout and "Extra inputs are not permitted" in run.stdout


def test_an_import_format_of_another_package_is_a_command(folder):
    (folder / "voc").mkdir()
    (folder / "voc/a.xml").write_text(PASCAL)
    Image.new("RGB", (40, 30)).save(folder / "voc/a.png")
    run = coordexp(folder, "data", "import", "pascal", "voc", "--out", "voc.jsonl")
    assert run.returncode == 0, run.stderr
    (record,) = [json.loads(line) for line in (folder / "voc.jsonl").read_text().splitlines()]
    (only,) = record["objects"]
    assert (only["desc"], only["bbox_2d"]) == ("cup", [4, 5, 20, 21])


def test_a_model_family_of_another_package_answers_as_the_one_that_it_is_made_from(folder):
    shutil.copytree(MODEL, folder / "model")
    settings = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps(settings | {"model_type": "my_vl"}))
    draw(folder / "scenes")
    words = ["predict", "--data", str(folder / "scenes/data/val.jsonl"), "--max-new-tokens", "48"]
    done = coordexp(folder, *words, "--model", "model", "--out", "added.json")
    assert done.returncode == 0, done.stderr
    run(*words, "--model", MODEL, "--out", folder / "own.json")
    added, expected = (json.loads((folder / f"{name}.json").read_text()) for name in ("added", "own"))
    assert added == expected and expected


def test_a_broken_loss_module_is_an_error_of_the_config_that_declares_it_and_of_nothing_else(tmp_path):
    install(tmp_path)
    (tmp_path / "my_package/settings.py").write_text("import nothing_of_that_name")
    file = config(draw(tmp_path), "declared")
    assert coordexp(tmp_path, "check", "--config", str(file)).returncode == 0
    tree = yaml.safe_load(file.read_text())
    tree["rollout_matching"]["pipeline"]["objective"] += yaml.safe_load(blocks("yaml")[0])
    file.write_text(yaml.safe_dump(tree))
    run = coordexp(tmp_path, "check", "--config", str(file))
    shown = " ".join((run.stdout + run.stderr).split())
    assert run.returncode != 0 and "Traceback" not in shown
    assert "my-package adds `sharpness`" in shown and "nothing_of_that_name" in shown


def test_a_module_of_another_package_alone_is_an_objective_only_if_an_own_one_is_named_and_off(tmp_path):
    install(tmp_path)
    base = config(draw(tmp_path), "declared")
    own = base.with_name("own.yaml")
    off = yaml.safe_load(base.read_text())["rollout_matching"]["pipeline"]["objective"][0] | {"enabled": False}
    for modules, code, gone in (([], 2, None), ([off], 0, "coord_reg is gone")):
        pipeline = {"objective": [*modules, *yaml.safe_load(blocks("yaml")[0])]}
        own.write_text(yaml.safe_dump({"extends": [base.name], "rollout_matching": {"pipeline": pipeline}}))
        run = coordexp(tmp_path, "check", "--config", str(own), "--json")
        assert run.returncode == code, run.stderr
        findings = json.loads(run.stdout)["findings"]
        problems = [finding for finding in findings if finding["subject"] == "rollout_matching.pipeline.objective"]
        assert [problem["severity"] for problem in problems] == ["error" if code else "note"]
        assert not gone or gone in problems[0]["problem"]


def test_the_settings_of_an_added_policy_are_checked(folder):
    file = config(draw(folder / "policy"), "declared")
    tree = yaml.safe_load(file.read_text())
    for policy, subject in (
        ({"name": "inner", "config": {"margin": -1}}, "config.margin"),
        ({"name": "inner", "config": {"margin": 1, "other": 2}}, "config.other"),
        ({"name": "outer", "config": {}}, "name"),
    ):
        tree["rollout_matching"]["correction"]["added_policy"] = policy
        file.write_text(yaml.safe_dump(tree))
        run = coordexp(folder, "check", "--config", str(file), "--json")
        assert run.returncode == 2, run.stderr
        subjects = [finding["subject"] for finding in json.loads(run.stdout)["findings"]]
        assert f"rollout_matching.correction.added_policy.{subject}" in subjects


def test_a_name_that_is_taken_is_not_used_and_there_is_a_warning(tmp_path):
    install(tmp_path)
    entries = tmp_path / "my_package-1.0.dist-info/entry_points.txt"
    entries.write_text(entries.read_text().replace("pascal = ", "coco = "))
    run = coordexp(tmp_path, "data", "import", "coco", str(entries), "--out", "new.jsonl")
    assert "--images" in run.stderr, "our own format needs images"
    assert "my-package adds `coco` to coordexp.importers, but this name is taken" in run.stderr
