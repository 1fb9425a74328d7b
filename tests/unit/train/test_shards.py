"""Training data in several files and data sets, as a run opens it."""

import json

import pytest

from coordexp.train.data import RunData, make_order
from tests.unit.config.trees import load, stage2


def write(file, boxes):
    """Write a record with each of these numbers of objects. The second object of a record has no area."""
    file.parent.mkdir(exist_ok=True)
    shapes = [[1, 2, 30, 40], [5, 5, 5, 5]]
    for k, count in enumerate(boxes):
        objects = [{"desc": "cup", "bbox_2d": box} for box in shapes[:count]]
        record = {"image": f"{k}.png", "width": 64, "height": 48, "space": "pixel", "objects": objects}
        with file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "a/0.jsonl", (1, 0, 2))
    write(tmp_path / "b/0.jsonl", (0, 1))
    return tmp_path


def order_of_run(**custom):
    settings = load(stage2(**{f"custom__{name}": value for name, value in custom.items()})).settings
    return make_order(settings, RunData.open(settings.custom).train, 0, 1)


def test_a_curriculum_chooses_records_of_all_files(folder):
    stages = [{"objects": 1, "samples": 8}, {"objects": 2, "samples": 8}]
    order = order_of_run(train_jsonl=[str(folder / "b/0.jsonl"), str(folder / "a/0.jsonl")], curriculum=stages)
    chosen = [stage.records.tolist() for stage in order._stages]
    assert chosen == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_several_sets_are_mixed_by_their_weights_and_one_set_is_not_mixed(folder):
    sets = [{"path": str(folder / "b/*.jsonl"), "weight": 0.5}, {"path": [str(folder / "a/0.jsonl")], "weight": 2}]
    mixture = order_of_run(train_jsonl=None, train_data=sets)._mixture
    assert (mixture.shares, mixture.sizes) == ((1, 4), (2, 3))
    assert order_of_run(train_jsonl=None, train_data=sets[:1])._mixture is None
    assert order_of_run(train_jsonl=str(folder / "*/0.jsonl"))._mixture is None
