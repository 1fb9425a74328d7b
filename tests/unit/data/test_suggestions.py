"""Suggested labels on disk, decisions about them, and completed records."""

import json

import pytest

from coordexp.data import Geometry, Record, RecordFile, RecordObject
from coordexp.data.records import SPACES
from coordexp.data.suggestions import (
    Suggestion,
    accept,
    add_labels,
    complete_records,
    read_decisions,
    read_suggestions,
    to_record_object,
    write_suggestions,
)
from coordexp.errors import DataError

CUP = RecordObject("cup", "bbox_2d", (10, 20, 110.5, 220))
LEAF = RecordObject('a "leaf" ☘', "poly", (1, 2, 30, 4, 5, 60), 7)


def suggestion(id=1, item=CUP, image_id=1, image="a.png", labels=1, score=0.9, agreement=None):
    return Suggestion(id, image_id, image, labels, item, score, agreement)


def record(*objects, image="a.png", space="pixel", image_id=None):
    return Record(image, 640, 480, space, objects, image_id)


def write_records(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(item.as_json() + "\n" for item in records))
    return RecordFile(path)


def test_suggestions_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "suggestions.jsonl"
    written = write_suggestions(file, [suggestion(), suggestion(2, LEAF, 9, "b ä.png", 0, 0.25, 0.5)])
    assert read_suggestions(file) == written
    assert [item.item for item in written.suggestions] == [CUP, LEAF]
    assert list(json.loads(file.read_text().splitlines()[1])) == [
        *("id", "image_id", "image", "labels", "desc", "poly", "category_id", "score", "agreement")
    ]


def write_decisions(path, file, decisions, **changes):
    path.write_text(json.dumps({"format": 1, "suggestions": file.sha256, "decisions": decisions} | changes))
    return path


def test_decisions_are_read_by_the_id_of_the_suggestion(tmp_path):
    file = write_suggestions(tmp_path / "s.jsonl", [suggestion(), suggestion(2)])
    path = write_decisions(tmp_path / "d.json", file, {"2": "accept", "1": "reject"})
    assert read_decisions(path, file) == {1: "reject", 2: "accept"}


def test_a_decision_counts_before_the_score():
    suggestions = [suggestion(k, score=score) for k, score in enumerate((0.9, 0.8, 0.7, 0.6), start=1)]
    decisions = {1: "reject", 4: "accept"}
    assert [item.id for item in accept(suggestions, decisions, None)] == [4]
    assert [item.id for item in accept(suggestions, decisions, 0.7)] == [2, 3, 4]
    assert [item.id for item in accept(suggestions, {}, 0.8)] == [1, 2]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("size", [(640, 480), (1, 1), (33, 7000)])
def test_a_suggested_label_has_the_predicted_bins_in_every_space(space, size):
    target = Record("a.png", *size, space, ())
    for bins in ((0, 0, 999, 999), (1, 498, 2, 501), (333, 666, 334, 667)):
        item = to_record_object("cup", Geometry("bbox_2d", bins), target, 4)
        assert target.in_bins(item) == bins
        assert item.category_id == 4


def test_labels_in_reading_order_stay_in_reading_order():
    first, last = RecordObject("a", "bbox_2d", (50, 10, 60, 20)), RecordObject("b", "bbox_2d", (5, 90, 9, 99))
    added = [RecordObject("d", "poly", (7, 95, 9, 90, 8, 99)), RecordObject("c", "bbox_2d", (10, 10, 60, 20))]
    assert [item.desc for item in add_labels(record(first, last), added).objects] == ["c", "a", "b", "d"]
    assert [item.desc for item in add_labels(record(last, first), added).objects] == ["b", "a", "c", "d"]


def test_completed_records_keep_their_ids_and_their_other_labels(tmp_path):
    untouched, unnamed = record(CUP, image="b.png", image_id=4), record(CUP)
    records = write_records(tmp_path / "train.jsonl", record(LEAF, image_id=70), untouched, unnamed)
    accepted = [suggestion(1, CUP, image_id=70), suggestion(2, LEAF, image_id=3)]  # the third record has line 3
    completed = list(complete_records(records, accepted, tmp_path))
    assert completed == [record(LEAF, CUP, image_id=70), untouched, record(LEAF, CUP)]


def test_images_are_named_from_the_folder_of_the_completed_file(tmp_path):
    absolute = str(tmp_path / "c.png")
    records = write_records(tmp_path / "data/train.jsonl", record(image="images/a.png"), record(image=absolute))
    completed = complete_records(records, [], tmp_path / "new/deep")
    assert [item.image for item in completed] == ["../../data/images/a.png", absolute]


def test_labels_are_not_added_twice(tmp_path):
    records = write_records(tmp_path / "train.jsonl", record(LEAF))
    completed = write_records(tmp_path / "new.jsonl", *complete_records(records, [suggestion()], tmp_path))
    with pytest.raises(DataError):
        list(complete_records(completed, [suggestion()], tmp_path))
