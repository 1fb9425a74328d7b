"""Drawn scenes: exact shapes, the requested shares of object kinds, and the same scenes for the same seed."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from coordexp.data import read_any_records, read_records
from coordexp.demo.scenes import COLOURS, COMMON, RARE, SceneSettings, draw_scenes, write_scenes
from tests.command import run

RICH = SceneSettings(side=96, objects=(1, 30), empty=0.1, rare=0.1, polygons=0.5, rotated=0.5, overlap=0.4)


def write_rich_scenes(folder: Path, settings: SceneSettings = RICH, seed: int = 5) -> Path:
    write_scenes(folder, settings, train=30, val=10, seed=seed)
    return folder


def test_the_same_seed_gives_the_same_files_and_another_seed_different_ones(tmp_path):
    first, same, other = (
        write_rich_scenes(tmp_path / name, seed=seed) for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert len(files) == 40 + 4
    assert all((first / file).read_bytes() == (same / file).read_bytes() for file in files)
    assert (first / "train.jsonl").read_bytes() != (other / "train.jsonl").read_bytes()
    assert (first / "train.jsonl").read_text().splitlines()[0] != (first / "val.jsonl").read_text().splitlines()[0]


def test_shapes_are_drawn_where_their_records_say():
    """The colour of a single shape fills its outline and nothing outside its box."""
    single = SceneSettings(side=64, objects=(1, 1), polygons=1.0, rotated=1.0)
    for scene in draw_scenes(20, single, seed=1, folder="x"):
        (shape,) = scene.record.objects
        pixels = np.asarray(scene.image).astype(int)
        background = pixels[0, 0] if _outside(shape.coords, (0, 0)) else pixels[-1, -1]
        painted = np.abs(pixels - background).sum(-1) > 60
        mask = Image.new("1", (64, 64))
        ImageDraw.Draw(mask).polygon(list(shape.coords), fill=1)
        drawn = np.asarray(mask)
        assert (painted & drawn).sum() / (painted | drawn).sum() > 0.8
        ys, xs = painted.nonzero()
        assert abs(xs.min() - min(shape.coords[::2])) <= 1.5
        assert abs(ys.max() + 1 - max(shape.coords[1::2])) <= 1.5


def _outside(coords, point):
    return min(coords[::2]) > point[0] + 2 or min(coords[1::2]) > point[1] + 2


def test_the_shares_of_object_kinds_are_as_requested():
    records = [scene.record for scene in draw_scenes(300, RICH, seed=2, folder="x")]
    counts = [len(record.objects) for record in records]
    assert 0.05 < np.mean([count == 0 for count in counts]) < 0.16
    assert max(counts) > 20
    objects = [item for record in records for item in record.objects]
    assert 0.4 < np.mean([item.kind == "poly" for item in objects]) < 0.6
    assert 0.06 < np.mean([item.desc.split()[1] in RARE for item in objects]) < 0.14
    assert {item.desc.split()[0] for item in objects} == set(COLOURS)


@pytest.mark.parametrize(("names", "classes"), [("shape", {*COMMON, *RARE}), ("colour", {*COLOURS})])
def test_classes_can_be_shapes_or_colours_alone(tmp_path, names, classes):
    settings = SceneSettings(objects=(1, 4), rare=0.4, ask=1.0, names=names)
    folder = write_rich_scenes(tmp_path / "scenes", settings)
    records = [record for _, record in read_records(folder / "train.jsonl")]
    assert {item.desc for record in records for item in record.objects} == classes
    assert {name for record in records for name in record.classes} == classes
    coco = json.loads((folder / "train.coco.json").read_text())
    assert {category["name"] for category in coco["categories"]} == classes


def test_the_doctor_finds_no_fault_in_scenes(tmp_path):
    folder = write_rich_scenes(tmp_path / "scenes", SceneSettings(objects=(1, 4)))
    result = run("data", "doctor", folder / "train.jsonl", "--json")
    assert not [finding for finding in json.loads(result.stdout)["findings"] if finding["severity"] == "error"]


def test_questions_about_scenes_have_one_right_answer(tmp_path):
    write_scenes(tmp_path, SceneSettings(objects=(1, 4), empty=0.2), train=30, val=10, seed=5, questions=3)
    scenes = {record.image: record for _, record in read_records(tmp_path / "train.jsonl")}
    chat = [record for _, record in read_any_records(tmp_path / "train.questions.jsonl")]
    assert (tmp_path / "val.questions.jsonl").is_file()
    for record in chat:
        scene = scenes[record.image]
        assert (record.width, record.height) == (scene.width, scene.height)
        words = [item.desc.split() for item in scene.objects]
        last = record.question.rstrip("?").split()[-1]
        answers = {
            "How many": {str(len(words))},
            "What colour": {colour for colour, shape in words if shape == last},
            "What shape": {shape for colour, shape in words if colour == last},
        }
        assert answers[" ".join(record.question.split()[:2])] == {record.answer}
    asked = [record.image for record in chat]
    assert max(map(asked.count, asked)) == 3 and set(asked) == set(scenes)
    assert len({record.question.split()[1] for record in chat}) == 3
