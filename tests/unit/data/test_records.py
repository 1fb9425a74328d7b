"""Records on disk: one JSON object per line, which states the space of its coordinates."""

import gzip
import json

import pytest

from coordexp.data import DataError, Record, RecordFile, RecordObject, parse_any_record, parse_record, read_records
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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[]", "^this is not a JSON object$"),
        ("{", "Expecting property name"),
        (json.dumps({"image": "a"}), "missing keys: height, objects, space, width"),
        (change(bbox=1), "unknown keys: bbox"),
        (
            change(objects=[{"label": "x", "bbox": [1, 2, 3, 4]}] * 20),
            r"missing keys: objects\[0\]\.desc, objects\[1\]\.desc,.* and 14 more; "
            r"unknown keys: objects\[0\]\.bbox, .* and 34 more; "
            "an object has desc, one of bbox_2d and poly, and may have category_id and meta$",
        ),
        (change(width="640"), "width '640': input should be a valid integer"),
        (change(height=0), "height 0: input should be greater than 0"),
        (change(width=True), "width True: input should be a valid integer"),
        (change(space="xywh"), "space 'xywh': input should be 'pixel', 'unit', 'norm1000' or 'bin'"),
        (change(image=""), "image is empty"),
        (change(objects={}), "objects {}: input should be a list"),
        (change(objects=[{"desc": "a"}]), r"objects\[0\] has no shape; it needs exactly one of bbox_2d, poly"),
        (
            change(objects=[{"desc": "a", "bbox_2d": [1, 2, 3, 4], "poly": []}]),
            "has bbox_2d and poly; it needs exactly one of",
        ),
        (change(objects=[{"desc": " ", "bbox_2d": [1, 2, 3, 4]}]), r"objects\[0\].desc is empty"),
        (change(objects=[{"desc": "a", "bbox_2d": [1, 2, 3]}]), "has 3 numbers; a box has 4"),
        (change(objects=[{"desc": "a", "poly": [1, 2, 3, 4, 5, 6, 7]}]), "has 7 numbers"),
        (
            change(objects=[{"desc": "a", "bbox_2d": [1, 2, 3, None]}]),
            r"objects\[0\].bbox_2d\[3\] None: input should be a valid number",
        ),
        (change(objects=["a"]), r"objects\[0\] is not a JSON object"),
        (json.dumps(LINE).replace("64,", "NaN,"), r"objects\[0\].bbox_2d\[0\] nan: input should be"),
        (json.dumps(LINE).replace('"width"', '"height": 9, "width"'), "the key 'height' occurs twice"),
        ("[" * 100_000, "nested too deeply"),
        (change(**{"a\0": 1}), r"unknown keys: 'a\\x00'"),
        (change(meta="a note"), "meta is not a JSON object"),
        (json.dumps({"messages": [], "images": ["a.png"]}), "ms-swift, LLaMA-Factory or LLaVA"),
        (json.dumps({"id": 1, "image": "a.png", "conversations": []}), "ms-swift, LLaMA-Factory or LLaVA"),
        (json.dumps({"instruction": "", "input": "", "output": ""}), "ms-swift, LLaMA-Factory or LLaVA"),
        (change(image_id=-1), "image_id -1: input should be greater than or equal to 0"),
        (change(image_id="7"), "image_id '7': input should be a valid integer"),
        (change(image_id=None), "image_id None: input should be a valid integer"),
        (change(image_id=2**63), f"image_id {2**63}: input should be less than {2**63}"),
        (
            change(objects=[{"desc": "a", "bbox_2d": [1, 2, 3, 4], "category_id": 1.0}]),
            r"objects\[0\].category_id 1.0: input should be a valid integer",
        ),
    ],
)
def test_a_broken_record_says_what_is_wrong(line, words):
    with pytest.raises(ValueError, match=words):
        parse_record(line)


def test_any_line_can_be_read_and_a_broken_one_is_named(tmp_path):
    file = tmp_path / "train.jsonl"
    lines = [change(image=f"{k}.png") for k in range(3)]
    file.write_text(f"{lines[0]}\n\n{lines[1]}\n{{}}\n{lines[2]}")
    records = RecordFile(file)
    assert len(records) == 4
    assert records[3].image == "2.png"
    assert records[1].image == "1.png"
    assert records.image_path(records[0]) == tmp_path / "0.png"
    with pytest.raises(DataError, match=r"train\.jsonl:4: missing keys: height[\s\S]*coordexp data doctor"):
        records[2]
    with pytest.raises(DataError, match=r"train\.jsonl:4"):
        list(read_records(file))


def test_a_file_without_records_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no records"):
        RecordFile(tmp_path / "empty.jsonl")


def test_a_shape_without_area_cannot_become_a_true_object():
    flat = Record("a.png", 10, 10, "pixel", (RecordObject("line", "bbox_2d", (1.0, 1.0, 1.0, 5.0)),))
    with pytest.raises(ValueError, match="has no area"):
        flat.true_objects()


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
    ("content", "problem"),
    [
        (gzip.compress(json.dumps(LINE).encode()), "is compressed"),
        (json.dumps({"images": [{"id": 1}], "annotations": [], "categories": []}).encode(), "is a COCO file"),
        (json.dumps({"info": {}, "images": [], "annotations": []}, indent=2).encode(), "is a COCO file"),
        (json.dumps([{"image_id": 1, "bbox": [1, 2, 3, 4]}]).encode(), "is one JSON list"),
        (json.dumps([{"data": {}, "annotations": []}], indent=1).encode(), "is one JSON list"),
    ],
)
def test_a_file_of_another_format_is_named_by_all_readers(tmp_path, content, problem):
    file = tmp_path / "train.jsonl"
    file.write_bytes(content)
    for read in (RecordFile, lambda path: list(read_records(path)), examine):
        with pytest.raises(DataError, match=problem) as raised:
            read(file)
        assert raised.value.problem.startswith(f"{file} ") and raised.value.fix


@pytest.mark.parametrize("first", [LINE, {"images": ["a.png"], "messages": []}, {"annotations": 1}, {}])
def test_a_line_that_only_resembles_another_format_is_a_line(tmp_path, first):
    file = tmp_path / "train.jsonl"
    file.write_text(f"{json.dumps(first)}\n{json.dumps(LINE)}\n")
    assert len(RecordFile(file)) == 2
