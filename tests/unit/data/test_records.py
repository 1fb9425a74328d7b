"""Records on disk: one JSON object per line, which states the space of its coordinates."""

import gzip
import json

import pytest

from coordexp.data import DataError, RecordFile, parse_any_record, parse_record, read_records
from coordexp.data.doctor import examine

LINE = {
    "image": "images/7.png",
    "width": 640,
    "height": 480,
    "space": "pixel",
    "objects": [
        {"desc": "red cup", "bbox_2d": [64, 48, 320, 480.0]},
        {"desc": "Blatt \u00e9", "poly": [0, 0, 640, 0, 640.0, 479.52]},
    ],
}


def change(**changes):
    return json.dumps({**LINE, **changes})


def test_a_record_reads_back_as_it_was_written():
    record = parse_record(json.dumps(LINE))
    assert parse_record(record.as_json()) == record
    assert record.objects[1].desc == "Blatt \u00e9"


@pytest.mark.parametrize(
    ("space", "box"),
    [
        ("pixel", [64, 48, 320, 480]),
        ("unit", [0.1, 0.1, 0.5, 1.0]),
        ("norm1000", [100, 100, 500, 1000]),
        ("bin", [99.9, 99.9, 499.5, 999]),
    ],
)
def test_every_space_gives_the_same_bins_and_pixels(space, box):
    record = parse_record(change(space=space, objects=[{"desc": "cup", "bbox_2d": box}]))
    assert record.true_objects()[0].geometry.bins == (100, 100, 500, 999)
    assert record.in_pixels(record.objects[0]) == pytest.approx((64, 48, 320, 480))


def test_any_line_can_be_read_and_a_broken_one_is_named(tmp_path):
    file = tmp_path / "train.jsonl"
    lines = [change(image=f"{k}.png") for k in range(3)]
    file.write_text(f"{lines[0]}\n\n{lines[1]}\n{{}}\n{lines[2]}")
    records = RecordFile(file)
    assert len(records) == 4
    assert records[3].image == "2.png"
    assert records[1].image == "1.png"
    assert records.image_address(records[0]) == str(tmp_path / "0.png")
    with pytest.raises(DataError, match=r"train\.jsonl:4"):
        records[2]
    with pytest.raises(DataError, match=r"train\.jsonl:4"):
        list(read_records(file))


def test_ids_of_coco_are_kept_and_name_the_image(tmp_path):
    line = change(image_id=0, objects=[{"desc": "a", "bbox_2d": [1, 2, 3, 4], "category_id": 7}])
    record = parse_record(line)
    assert (record.image_id, record.objects[0].category_id) == (0, 7)
    assert parse_record(record.as_json()) == record
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(LINE)}\n{line}\n")
    records = RecordFile(tmp_path / "a.jsonl")
    assert [records.read_with_image_id(k)[0] for k in range(2)] == [1, 0]


def test_keys_of_the_user_in_meta_are_kept_and_have_no_other_effect():
    own = {"source": {"camera": 7}, "images": [1], "messages": None, "é": "\ud83d"}
    line = LINE | {"meta": own, "objects": [item | {"meta": {"score": 0.5}} for item in LINE["objects"]]}
    record = parse_record(json.dumps(line))
    assert record == parse_record(json.dumps(LINE)) and hash(record) == hash(parse_record(json.dumps(LINE)))
    assert json.loads(record.as_json()) == line
    assert parse_any_record(json.dumps({"question": "a", "answer": "b", "meta": own})).question == "a"


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(json.dumps(LINE).encode()),
        json.dumps({"info": {}, "images": [], "annotations": []}, indent=2).encode(),
        json.dumps([{"data": {}, "annotations": []}], indent=1).encode(),
    ],
)
def test_a_file_of_another_format_is_named_by_all_readers(tmp_path, content):
    file = tmp_path / "train.jsonl"
    file.write_bytes(content)
    for read in (RecordFile, lambda path: list(read_records(path)), examine):
        with pytest.raises(DataError) as raised:
            read(file)
        assert raised.value.problem.startswith(f"{file} ") and raised.value.fix


@pytest.mark.parametrize("first", [LINE, {"images": ["a.png"], "messages": []}, {"annotations": 1}, {}])
def test_a_line_that_only_resembles_another_format_is_a_line(tmp_path, first):
    file = tmp_path / "train.jsonl"
    file.write_text(f"{json.dumps(first)}\n{json.dumps(LINE)}\n")
    assert len(RecordFile(file)) == 2
