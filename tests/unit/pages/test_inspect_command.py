"""`coordexp inspect`: the page of a run folder, and what it refuses."""

import json
import re
import shutil
from pathlib import Path

import pytest

from coordexp.pages.rollouts import find_soft_target
from tests.command import run
from tests.dumped import TRUTH
from tests.unit.pages.run_folders import COORD_REG, write_dumped_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_dumped_run(tmp_path_factory.mktemp("runs") / "demo")


FIRST = "dumps/step-000000.jsonl"


def element(text: str, name: str):
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text)[1])


def test_a_page_is_written_beside_the_run_with_all_of_its_examples(folder):
    result = run("inspect", folder)
    assert (result.exit_code, result.stdout) == (0, f"wrote {folder / 'inspect.html'}: all 6 dumped examples\n")
    text = (folder / "inspect.html").read_text()
    index = element(text, "index")
    assert index["stamp"] is None
    assert index["target"] == {"sigma": 8.0, "truncate": 24, "temperature": 1.0}
    assert [(entry["step"], entry["image"]) for entry in index["samples"]] == [
        (step, name) for step in (1, 2) for name in TRUTH
    ]
    assert {entry["picture"] for entry in index["samples"]} == {"picture-0", "picture-1", "picture-2"}
    assert element(text, "picture-0").startswith("data:image/png;base64,")
    assert element(text, "sample-5")["id"] == index["samples"][5]["id"] == "2.0.2"


def test_images_of_data_in_several_folders_have_their_whole_path(tmp_path):
    folder = write_dumped_run(tmp_path / "run", steps=(0,))
    (start,) = json.loads((folder / "run.json").read_text())
    whole = start["data"]["train"]
    start["data"]["train"] = whole | {"files": [whole, whole | {"file": str(tmp_path / "records.jsonl")}]}
    (folder / "run.json").write_text(json.dumps([start]))
    run("inspect", folder)
    index = element((folder / "inspect.html").read_text(), "index")
    assert [entry["image"] for entry in index["samples"]] == [str(folder / name) for name in TRUTH]


def test_images_are_found_relative_to_where_the_run_was_started(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    folder = write_dumped_run(Path("runs/demo"), steps=(0,))
    for place in (tmp_path, tmp_path / "runs", Path("/")):
        monkeypatch.chdir(place)
        result = run("inspect", tmp_path / folder)
        assert "no image" not in result.stderr


def test_a_record_that_occurs_twice_in_a_step_has_two_addresses(tmp_path):
    folder = write_dumped_run(tmp_path / "demo", steps=(0,))
    file = folder / FIRST
    file.write_text(file.read_text() * 2)
    run("inspect", folder)
    text = (folder / "inspect.html").read_text()
    ids = [entry["id"] for entry in element(text, "index")["samples"]]
    assert ids == ["1.0.0", "1.0.1", "1.0.2", "1.0.0.2", "1.0.1.2", "1.0.2.2"]
    assert [element(text, f"sample-{k}")["id"] for k in range(6)] == ids


def test_class_names_are_marked_as_masked_when_the_objective_masks_them(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "masked")
    manifest = json.loads((other / "run.json").read_text())
    manifest[-1]["objective"]["masked_desc"] = ["B"]
    (other / "run.json").write_text(json.dumps(manifest))
    for run_folder, masked in ((folder, False), (other, True)):
        run("inspect", run_folder)
        roles = element((run_folder / "inspect.html").read_text(), "sample-0")["tokens"]["roles"]
        assert (8 in roles) == masked and (4 in roles) != masked


@pytest.mark.parametrize(
    "change",
    [
        {"enabled": False},
        {"weight": 0.0},
        {"channels": ["A"]},
        {"name": "token_ce"},
        {"config": COORD_REG["config"] | {"soft_ce_weight": 0.0, "w1_weight": 0.0}},
    ],
)
def test_a_soft_target_that_no_loss_on_rollouts_uses_is_not_drawn(change):
    targets = [
        find_soft_target({"rollout_matching": {"pipeline": {"objective": [module]}}})
        for module in (COORD_REG, COORD_REG | change)
    ]
    assert targets == [{"sigma": 8.0, "truncate": 24, "temperature": 1.0}, None]
