"""Removing labels: how many, which, and what a record then says."""

import json
from itertools import pairwise

import numpy as np
import pytest

from coordexp.data import read_records
from coordexp.data.thin import thin
from coordexp.errors import UserError
from coordexp.tasks import ignore
from tests.command import run

SIZES = (20, 200)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """A file with 200 images of 1 to 20 objects of five classes, small and large."""
    file, draw = tmp_path_factory.mktemp("scenes") / "all.jsonl", np.random.default_rng(3)
    lines = []
    for number in range(200):
        objects = []
        for _ in range(int(draw.integers(1, 21))):
            x, y, size = *draw.integers(0, 700, 2).tolist(), SIZES[int(draw.integers(2))]
            objects.append({"desc": f"kind {draw.integers(5)}", "bbox_2d": [x, y, x + size, y + size]})
        head = {"image": f"{number}.png", "width": 1000, "height": 1000, "space": "pixel"}
        lines.append(json.dumps(head | {"exhaustive": ["kind 0", "kind 1"], "objects": objects}) + "\n")
    file.write_text("".join(lines))
    return file


def read(file):
    return [record for _, record in read_records(file)]


def thin_by(file, by="object", share=0.5, seed=0):
    target = file.with_name(f"{by}-{share}-{seed}.jsonl")
    thin(file, target, share, by, seed, ignore)
    return read(target)


def labelled_share(before, after, choose):
    counts = [sum(sum(map(choose, record.objects)) for record in records) for records in (after, before)]
    return counts[0] / counts[1]


@pytest.mark.parametrize("by", ["object", "class", "size", "crowd"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_about_this_share_is_removed_and_every_image_keeps_a_label(scenes, by, share):
    before, after = read(scenes), thin_by(scenes, by, share)
    assert labelled_share(before, after, lambda _: True) == pytest.approx(1 - share, abs=0.06)
    for record, thinned in zip(before, after, strict=True):
        assert thinned.image == record.image
        places = [record.objects.index(item) for item in thinned.objects]
        assert places
        assert all(a < b for a, b in pairwise(places))
        lost = {item.desc for item in record.objects if item not in thinned.objects}
        assert thinned.exhaustive == tuple(desc for desc in ("kind 0", "kind 1") if desc not in lost)


def test_by_size_small_objects_lose_most_labels_and_by_crowd_those_in_full_images(scenes):
    before, after = read(scenes), thin_by(scenes, "size")
    small, large = [
        labelled_share(before, after, lambda item, size=size: item.coords[2] - item.coords[0] == size)
        for size in SIZES
    ]
    assert small == pytest.approx(0.15, abs=0.06)
    assert large == pytest.approx(0.85, abs=0.06)
    counts = np.array(
        [[len(a.objects), len(b.objects)] for a, b in zip(before, thin_by(scenes, "crowd"), strict=True)]
    )
    full = counts[:, 0] > 15
    shares = [counts[where, 1].sum() / counts[where, 0].sum() for where in (full, ~full)]
    assert shares[0] < 0.3 < 0.6 < shares[1]


def test_by_class_an_image_has_all_labels_of_a_class_or_none(scenes):
    for record, thinned in zip(read(scenes), thin_by(scenes, "class"), strict=True):
        kept = {item.desc for item in thinned.objects}
        assert [item for item in record.objects if item.desc in kept] == list(thinned.objects)


def test_the_seed_decides(scenes):
    assert thin_by(scenes, seed=1) == thin_by(scenes, seed=1) != thin_by(scenes, seed=2)


def test_a_class_without_a_label_is_not_asked_for_and_what_is_asked_for_keeps_one(tmp_path):
    file, target = tmp_path / "asking.jsonl", tmp_path / "thin.jsonl"
    objects = [{"desc": desc, "bbox_2d": [0, 0, 9, 9]} for desc in ("cup", "cup", "dog", "lamp", "lamp", "lamp")]
    head = {"image": "a.png", "width": 9, "height": 9, "space": "pixel", "classes": ["cup", "dog", "cat"]}
    file.write_text(f"{json.dumps(head | {'objects': objects})}\n" * 200)
    thin(file, target, 0.7, "object", 0, ignore)
    for record in read(target):
        kept = {item.desc for item in record.asked_objects}
        assert kept
        assert set(record.classes) == kept | {"cat"}


def test_a_file_of_which_no_label_can_be_removed_is_not_written(tmp_path):
    file, target = tmp_path / "one.jsonl", tmp_path / "thin.jsonl"
    item = {"desc": "cup", "bbox_2d": [0, 0, 9, 9]}
    head = {"image": "a.png", "width": 9, "height": 9, "space": "pixel"}
    file.write_text(json.dumps(head | {"objects": [item, item]}) + "\n")
    with pytest.raises(UserError):
        thin(file, target, 0.5, "class", 0, ignore)
    assert not target.exists()


def test_the_command_says_how_many_labels_it_removed(scenes):
    target = scenes.with_name("thin.jsonl")
    result = run("data", "thin", scenes, "--remove", "0.5", "--out", target)
    left = sum(len(record.objects) for record in read(target))
    total = sum(len(record.objects) for record in read(scenes))
    assert f"{total - left:,} of {total:,}" in result.output
    run("data", "thin", scenes, "--remove", "1", "--out", "x", code=1)
