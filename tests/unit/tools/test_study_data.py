"""The data of the study: which labels are missing, and that no image or scan is in two splits."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from study_data import (
    SOURCES,
    annotate_half_of_classes,
    make_data,
    remove_labels,
    split_scans,
)

from coordexp.data import Record, RecordFile, RecordObject, read_records
from coordexp.demo.scenes import SceneSettings, draw_scenes


def draw_records(count: int = 40) -> list[Record]:
    settings = SceneSettings(side=64, objects=(3, 10))
    return [scene.record for scene in draw_scenes(count, settings, seed=3, folder="images")]


def is_subsequence(part: tuple[RecordObject, ...], whole: tuple[RecordObject, ...]) -> bool:
    rest = iter(whole)
    return all(item in rest for item in part)


def read(file) -> list[Record]:
    return [record for _, record in read_records(file)]


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_the_share_of_labels_that_is_removed_is_exact_and_every_image_keeps_one(share):
    records = draw_records()
    thinned = remove_labels(records, share, seed=5)
    total = sum(len(record.objects) for record in records)
    assert sum(len(record.objects) for record in thinned) == total - round(share * total)
    assert all(record.objects for record in thinned)


@pytest.mark.parametrize(
    "thin", [lambda records, seed: remove_labels(records, 0.5, seed), annotate_half_of_classes]
)
def test_labels_are_removed_by_a_seed_and_the_others_stay_in_order(thin):
    records = draw_records()
    thinned = thin(records, 5)
    assert thinned == thin(records, 5) != thin(records, 6)
    for before, after in zip(records, thinned, strict=True):
        assert is_subsequence(after.objects, before.objects)
        assert replace(after, objects=before.objects) == before


def test_a_federated_image_has_all_objects_of_at_most_half_of_the_classes_and_at_least_one():
    records = draw_records(200)
    classes = {item.desc for record in records for item in record.objects}
    thinned = annotate_half_of_classes(records, 5)
    for before, after in zip(records, thinned, strict=True):
        annotated = {item.desc for item in after.objects}
        assert after.objects == tuple(item for item in before.objects if item.desc in annotated)
        assert 1 <= len(annotated) <= (len(classes) + 1) // 2
    kept = sum(len(record.objects) for record in thinned) / sum(len(record.objects) for record in records)
    assert 0.45 < kept < 0.6
    counts = Counter(item.desc for record in thinned for item in record.objects)
    assert counts.keys() == classes <= set(SceneSettings().classes())


def test_regimes_share_images_and_only_training_lacks_labels(tmp_path):
    complete = make_data(tmp_path, "complete", train=12, held_out=6)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")}
    thinned = make_data(tmp_path, "missing-50")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")} == before
    assert len(before) == 18
    for name in ("train-complete", "val", "test"):
        assert (thinned / f"{name}.jsonl").read_bytes() == (complete / f"{name}.jsonl").read_bytes()
    whole, part = read(complete / "train.jsonl"), read(thinned / "train.jsonl")
    assert whole == read(complete / "train-complete.jsonl")
    assert [record.image for record in part] == [record.image for record in whole]
    assert sum(len(record.objects) for record in part) < 0.6 * sum(len(record.objects) for record in whole)
    records = RecordFile(thinned / "train.jsonl")
    assert (thinned / records[0].image).is_file()


def test_no_scan_is_in_two_splits():
    parts = split_scans(1797, seed=23)
    assert sorted(np.concatenate(list(parts.values()))) == list(range(1797))
    assert all(len(part) > 250 for part in parts.values())


def test_the_pages_of_a_split_have_only_scans_of_that_split(tmp_path, monkeypatch):
    numbers = np.arange(60)  # in place of the digits, so that an object's desc is the number of its scan
    scans = np.random.default_rng(0).uniform(0.5, 1, (60, 8, 8))
    monkeypatch.setattr("study_data.load_scans", lambda: (scans, numbers))
    folder = make_data(tmp_path, "digits-missing-50", train=6, held_out=6)
    parts = split_scans(60, SOURCES["digits"].seed)
    for name, split in (("train-complete", "train"), ("val", "val"), ("test", "test")):
        drawn = {int(item.desc) for record in read(folder / f"{name}.jsonl") for item in record.objects}
        assert drawn <= set(parts[split].tolist()) and len(drawn) > 5
