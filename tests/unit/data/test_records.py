"""Records on disk: one JSON object a line, with the space of its coordinates stated."""

import json

import pytest

from coordexp.data import Record, RecordError, RecordFile, RecordObject, parse_record, read_records

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


def changed(**changes):
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
    record = parse_record(changed(space=space, objects=[{"desc": "cup", "bbox_2d": box}]))
    assert record.sample().objects[0].geometry.bins == (100, 100, 500, 999)
    assert record.in_pixels(record.objects[0]) == pytest.approx((64, 48, 320, 480))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[]", "a record is a JSON object"),
        ("{", "Expecting property name"),
        (json.dumps({"image": "a"}), "missing keys: height, objects, space, width"),
        (changed(bbox=1), "unknown keys: bbox"),
        (changed(width="640"), "not positive whole numbers"),
        (changed(height=0), "not positive whole numbers"),
        (changed(width=True), "not positive whole numbers"),
        (changed(space="xywh"), "space 'xywh' is not one of pixel, unit, norm1000, bin"),
        (changed(image=""), "image is not a path"),
        (changed(objects={}), "objects is not a list"),
        (changed(objects=[{"desc": "a"}]), "it needs desc and one of bbox_2d, poly"),
        (changed(objects=[{"desc": "a", "bbox_2d": [1, 2, 3, 4], "poly": []}]), "it needs desc and one of"),
        (changed(objects=[{"desc": " ", "bbox_2d": [1, 2, 3, 4]}]), r"objects\[0\].desc is not a text"),
        (changed(objects=[{"desc": "a", "bbox_2d": [1, 2, 3]}]), "has 3 numbers; a box has 4"),
        (changed(objects=[{"desc": "a", "poly": [1, 2, 3, 4, 5, 6, 7]}]), "has 7 numbers"),
        (changed(objects=[{"desc": "a", "bbox_2d": [1, 2, 3, None]}]), "not a list of numbers"),
        (changed(objects=["a"]), r"objects\[0\] is not a JSON object"),
        (json.dumps(LINE).replace("64,", "NaN,"), "not a list of numbers"),
        (json.dumps(LINE).replace('"width"', '"height": 9, "width"'), "the key 'height' is there twice"),
        ("[" * 100_000, "nested too deeply"),
        (changed(**{"a\0": 1}), r"unknown keys: 'a\\x00'"),
        (changed(image_id=-1), "image_id -1 is not a whole number from 0"),
        (changed(image_id="7"), "image_id '7' is not a whole number from 0"),
        (changed(image_id=None), "image_id None is not a whole number from 0"),
        (changed(image_id=2**63), "is not a whole number from 0"),
        (
            changed(objects=[{"desc": "a", "bbox_2d": [1, 2, 3, 4], "category_id": 1.0}]),
            r"objects\[0\].category_id 1.0 is not a whole number from 0",
        ),
    ],
)
def test_a_broken_record_says_what_is_wrong(line, words):
    with pytest.raises(ValueError, match=words):
        parse_record(line)


def test_any_line_is_found_and_a_broken_one_is_named(tmp_path):
    file = tmp_path / "train.jsonl"
    lines = [changed(image=f"{k}.png") for k in range(3)]
    file.write_text(f"{lines[0]}\n\n{lines[1]}\n{{}}\n{lines[2]}")
    records = RecordFile(file)
    assert len(records) == 4
    assert records[3].image == "2.png"
    assert records[1].image == "1.png"
    assert records.image_path(records[0]) == tmp_path / "0.png"
    with pytest.raises(RecordError, match=r"train\.jsonl:4: missing keys: height[\s\S]*coordexp data doctor"):
        records[2]
    with pytest.raises(RecordError, match=r"train\.jsonl:4"):
        list(read_records(file))


def test_a_file_without_records_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RecordError, match="no records"):
        RecordFile(tmp_path / "empty.jsonl")


def test_a_shape_without_area_cannot_become_a_sample():
    flat = Record("a.png", 10, 10, "pixel", (RecordObject("line", "bbox_2d", (1.0, 1.0, 1.0, 5.0)),))
    with pytest.raises(ValueError, match="has no area"):
        flat.sample()


def test_ids_of_coco_are_kept_and_name_the_image(tmp_path):
    line = changed(image_id=0, objects=[{"desc": "a", "bbox_2d": [1, 2, 3, 4], "category_id": 7}])
    record = parse_record(line)
    assert (record.image_id, record.objects[0].category_id) == (0, 7)
    assert parse_record(record.as_json()) == record
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(LINE)}\n{line}\n")
    records = RecordFile(tmp_path / "a.jsonl")
    assert [records.numbered(k)[0] for k in range(2)] == [1, 0]
