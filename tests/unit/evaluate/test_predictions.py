"""Predictions on disk: files read back as they were written, and what breaks a rule is named."""

import json
from dataclasses import replace

import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from coordexp.correction import PredictedObject, Reason
from coordexp.data import Geometry, RecordFile
from coordexp.errors import DataError
from coordexp.evaluate import (
    AnswerObject,
    ImageAnswer,
    check_predictions,
    evaluate,
    read_predictions,
    read_truth,
    write_predictions,
)
from coordexp.evaluate.answer import NO_IMAGE, drop_duplicates
from coordexp.evaluate.behaviour import Rate
from coordexp.evaluate.predictions import UnfinishedPredictions, category_ids
from tests.unit.data.sources import coco, import_coco
from tests.unit.evaluate.scenes import BOX, FAR, answer, invalid_object, prediction, record

POLY = (10, 20, 110, 20, 60, 220)
TRUTH = [
    (1, record(("dog", BOX), ("cat", FAR))),
    (3, record(("leaf", POLY), image="b.png", width=500, height=250)),
]
ANSWERS = (
    answer(
        prediction("cat", FAR, 0.25),
        invalid_object(),
        prediction("unicorn", BOX, 1.0),
        text='{"a": "\u732b</script>\n"',
    ),
    answer(prediction("leaf", POLY), image_id=3, image="b.png", finish="length"),
)


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "deep" / "preds.json"
    write_predictions(path, ANSWERS, TRUTH)
    return path


def test_what_is_written_reads_back(written):
    predictions = read_predictions(written)
    assert predictions.answers == ANSWERS
    check_predictions(predictions, TRUTH)


def test_detections_are_coco_results_in_pixels(written):
    cat, unicorn, leaf = json.loads(written.read_text())
    assert cat == {"image_id": 1, "category_id": 1, "desc": "cat", "bbox": [600, 600, 200, 200], "score": 0.25}
    assert unicorn["category_id"] == 0
    assert leaf["category_id"] == 3
    assert leaf["bbox"] == pytest.approx([5.005, 5.005, 50.05, 50.05], abs=1e-3)
    assert leaf["segmentation"][0][:2] == pytest.approx([5.005, 5.005], abs=1e-3)


def test_an_image_without_detections_has_an_answer_all_the_same(tmp_path):
    write_predictions(tmp_path / "preds.json", [answer()], [(1, record())])
    assert json.loads((tmp_path / "preds.json").read_text()) == []
    assert read_predictions(tmp_path / "preds.json").answers == (answer(),)


def test_half_a_character_is_kept(tmp_path):
    half = answer(text='{"\ud83d"')
    write_predictions(tmp_path / "preds.json", [half], [(1, record())])
    assert read_predictions(tmp_path / "preds.json").answers == (half,)


def test_an_object_of_the_parser_is_converted_without_changes():
    sound = PredictedObject("object_1", 1, "cat", Geometry("bbox_2d", BOX), (4, 5, 6, 7), None)
    broken = PredictedObject("object_2", 2, "cat", None, (), Reason.degenerate)
    assert AnswerObject.from_parsed(sound, 0.5) == prediction("cat", BOX)
    assert AnswerObject.from_parsed(broken, None) == AnswerObject("cat", None, None, None, "degenerate")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bins": None}, "needs a reason"),
        ({"desc": None}, "needs a reason"),
        ({"bins": (1, 2, 3)}, "has 3 bins; a box has 4"),
        ({"bins": (5, 5, 5, 9)}, "has no area"),
        ({"bins": (5, 5, 1000, 9)}, "is outside the bins 0 to 999"),
        ({"score": float("nan")}, "score nan is not a finite number"),
    ],
)
def test_a_valid_object_cannot_be_without_a_sound_shape(change, words):
    with pytest.raises(ValueError, match=words):
        replace(prediction("cat", BOX), **change)


def test_a_valid_object_without_a_score_cannot_be_written(tmp_path):
    with pytest.raises(DataError, match=r"image_id 1: 'cat' has no score[\s\S]*token probabilities"):
        write_predictions(tmp_path / "preds.json", [answer(prediction("cat", BOX, None))], TRUTH)
    assert not (tmp_path / "preds.json").exists()


def test_an_answer_to_no_image_of_the_data_cannot_be_written(tmp_path):
    with pytest.raises(DataError, match=r"image_id 2 .* is not in the data"):
        write_predictions(tmp_path / "preds.json", [answer(image_id=2)], TRUTH)


LINE = {"image_id": 1, "image": "a.png", "text": "{}", "finish_reason": "stop", "tokens": 3, "objects": []}
OBJECT = {"desc": "cat", "kind": "bbox_2d", "bins": list(BOX), "score": 0.5, "reason": None}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Expecting property name"),
        ("[]", "not a JSON object"),
        (json.dumps(LINE | {"extra": 1}), "unknown keys: extra"),
        (json.dumps({"image_id": 1}), "missing keys: finish_reason, image, objects, text, tokens"),
        (json.dumps(LINE | {"image_id": -1}), "image_id -1: input should be greater than or equal to 0"),
        (json.dumps(LINE | {"image_id": True}), "image_id True: input should be a valid integer"),
        (json.dumps(LINE | {"tokens": 1.5}), "tokens 1.5: input should be a valid integer"),
        (json.dumps(LINE | {"text": None}), "text None: input should be a valid string"),
        (json.dumps(LINE | {"objects": {}}), "objects {}: input should be a list"),
        (json.dumps(LINE | {"objects": [OBJECT, 3]}), r"objects\[1\] is not a JSON object"),
        (
            json.dumps(LINE | {"objects": [OBJECT | {"kind": "box"}]}),
            "kind 'box': input should be 'bbox_2d' or 'poly'",
        ),
        (
            json.dumps(LINE | {"objects": [OBJECT | {"bins": [1.0, 2, 3, 4]}]}),
            r"bins\[0\] 1.0: input should be a valid integer",
        ),
        (
            json.dumps(LINE | {"objects": [OBJECT | {"score": "high"}]}),
            "score 'high': input should be a valid number",
        ),
        (json.dumps(LINE | {"objects": [OBJECT | {"reason": 3}]}), "reason 3: input should be a valid string"),
        (json.dumps(LINE | {"objects": [OBJECT | {"bins": [9, 9, 1, 1]}]}), "has no area"),
    ],
)
def test_a_broken_line_is_named(written, line, words):
    answers = written.with_suffix(".answers.jsonl")
    answers.write_text(f"\n{line}\n")
    with pytest.raises(DataError, match=rf"preds\.answers\.jsonl:2: .*{words}"):
        read_predictions(written)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"score": None}, "score None: input should be a valid number"),
        ({"bbox": [1, 2, 3]}, r"bbox \[1, 2, 3\]: it has too few items"),
        ({"segmentation": [[1, "2"]]}, r"segmentation\[0\]\[1\] '2': input should be a valid number"),
        ({"category_id": -1}, "category_id -1: input should be greater than or equal to 0"),
        ({"area": 3}, "unknown keys: area"),
    ],
)
def test_a_broken_detection_is_named(written, change, words):
    detections = json.loads(written.read_text())
    written.write_text(json.dumps([detections[0], detections[1] | change]))
    with pytest.raises(DataError, match=rf"preds\.json: \[1\]: .*{words}"):
        read_predictions(written)


def test_a_file_that_is_missing_cut_off_or_no_list_is_named(written):
    text = written.read_text()
    written.write_text(text[:40])
    with pytest.raises(DataError, match=r"preds\.json: "):
        read_predictions(written)
    written.write_text("{}")
    with pytest.raises(DataError, match="not a list"):
        read_predictions(written)
    written.with_suffix(".answers.jsonl").unlink()
    with pytest.raises(DataError, match=r"preds\.answers\.jsonl: no such file[\s\S]*both files"):
        read_predictions(written)


def test_two_answers_to_one_image_are_refused(written):
    answers = written.with_suffix(".answers.jsonl")
    answers.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE) + "\n")
    with pytest.raises(DataError, match=r":2: image_id 1 is already on line 1"):
        read_predictions(written)


def test_files_of_two_runs_are_told_apart(written):
    predictions = read_predictions(written)
    with pytest.raises(DataError, match="2 detections, but 3 valid objects"):
        check_predictions(replace(predictions, detections=predictions.detections[1:]), TRUTH)
    changed = (replace(predictions.detections[0], score=0.3), *predictions.detections[1:])
    with pytest.raises(DataError, match=r"detection \[0\][\s\S]*do not belong together"):
        check_predictions(replace(predictions, detections=changed), TRUTH)
    wider = [(1, replace(TRUTH[0][1], width=500)), TRUTH[1]]
    with pytest.raises(DataError, match=r"detection \[0\][\s\S]*do not belong together"):
        check_predictions(predictions, wider)


def test_an_answer_knows_what_is_valid_and_whether_it_was_cut():
    cut = ImageAnswer(1, "a.png", "{", "length", 3, (prediction("cat", BOX), invalid_object()))
    assert cut.valid == (prediction("cat", BOX),)
    assert cut.is_truncated
    assert not answer().is_truncated


def test_duplicates_are_dropped_whatever_their_descs_are_and_stay_visible(tmp_path):
    first, copy, beside = prediction("cat", BOX), prediction("dog", BOX, 0.9), prediction("leaf", FAR)
    whole = answer(first, invalid_object(), copy, beside, text="as it was")
    kept = drop_duplicates(whole, 0.9)
    assert kept == replace(whole, objects=(first, invalid_object(), beside), dropped=(copy,))
    assert drop_duplicates(answer(first, beside), 0.9) == answer(first, beside)

    write_predictions(tmp_path / "preds.json", [kept], TRUTH[:1])
    assert [item["desc"] for item in json.loads((tmp_path / "preds.json").read_text())] == ["cat", "leaf"]
    predictions = read_predictions(tmp_path / "preds.json")
    assert predictions.answers == (kept,)
    check_predictions(predictions, TRUTH[:1])
    report = evaluate(TRUTH[:1], predictions.answers)
    assert any("dropped 1 object as duplicate;" in note for note in report.notes)
    assert report.behaviour.rates["invalid"] == Rate(1, 3)


def test_an_answer_of_which_nothing_was_dropped_has_the_keys_of_earlier_releases(written):
    lines = written.with_suffix(".answers.jsonl").read_text().splitlines()
    assert {name for line in lines for name in json.loads(line)} == set(LINE)


def with_ids(record, image_id, *category_ids):
    objects = [replace(item, category_id=id) for item, id in zip(record.objects, category_ids, strict=True)]
    return image_id, replace(record, image_id=image_id, objects=tuple(objects))


def test_pycocotools_finds_predictions_in_the_coco_file_that_was_imported(tmp_path):
    """Ids that are no line numbers, 0 among them, and classes that are not in the order of their names."""
    names = {0: "zebra", 7: "ant", 90: "cow"}
    boxes = [[8, 6, 16, 12], [30, 20, 20, 20], [2, 30, 10, 10]]
    images = [{"id": id, "file_name": f"{id}.png", "width": 64, "height": 48} for id in (6000, 0, 4900)]
    annotations = [
        {"id": k, "image_id": image["id"], "category_id": category, "bbox": box, "area": 192, "iscrowd": 0}
        for k, (image, category, box) in enumerate(zip(images, names, boxes, strict=True), start=1)
    ]
    document = coco(annotations, images, [{"id": id, "name": name} for id, name in names.items()])
    import_coco(tmp_path, document)
    truth = read_truth(RecordFile(tmp_path / "out.jsonl"))
    answers = [
        answer(prediction(item.desc, item.geometry.bins), image_id=id, image=line.image)
        for id, line in truth
        for item in line.true_objects()
    ]
    answers[0] = replace(answers[0], objects=(*answers[0].objects, prediction("unicorn", FAR)))
    write_predictions(tmp_path / "preds.json", answers, truth)
    detections = json.loads((tmp_path / "preds.json").read_text())
    assert [(detection["image_id"], detection["category_id"]) for detection in detections] == [
        (6000, 0),
        (6000, 91),  # a class that the data does not have
        (0, 7),
        (4900, 90),
    ]
    original = COCO(str(tmp_path / "source.json"))
    scores = COCOeval(original, original.loadRes([d for d in detections if d["category_id"] != 91]), "bbox")
    scores.evaluate()
    scores.accumulate()
    scores.summarize()
    assert scores.stats[1] == pytest.approx(1.0)
    check_predictions(read_predictions(tmp_path / "preds.json"), truth)
    assert evaluate(truth, answers).metrics()["ap_50"] == pytest.approx(1.0)


def test_classes_without_an_id_get_the_next_free_numbers():
    truth = [with_ids(record(("b", BOX), ("a", FAR), ("b", FAR), ("c", BOX)), 5, 40, None, 3, None)]
    assert category_ids(truth) == {"a": 4, "b": 3, "c": 5}


def test_an_id_of_two_classes_or_of_two_images_is_refused(tmp_path):
    mixed = with_ids(record(("a", BOX), ("b", FAR)), 5, 1, 1)[1]
    (tmp_path / "a.jsonl").write_text(f"{mixed.as_json()}\n")
    with pytest.raises(DataError, match="category_id 1 is used for the class 'a' and for the class 'b'"):
        read_truth(RecordFile(tmp_path / "a.jsonl"))
    twice = [record(("a", BOX)), with_ids(record(("a", BOX)), 1, None)[1]]
    (tmp_path / "a.jsonl").write_text("".join(f"{line.as_json()}\n" for line in twice))
    with pytest.raises(DataError, match="2 records have the image_id 1 "):
        read_truth(RecordFile(tmp_path / "a.jsonl"))


def test_an_image_that_could_not_be_read_is_noted_and_its_objects_are_missed():
    truth = [(1, record(("cat", BOX))), (2, record(("cat", BOX), image="b.png"))]
    answers = [answer(prediction("cat", BOX)), answer(image_id=2, image="b.png", text="", finish=NO_IMAGE)]
    report = evaluate(truth, answers)
    assert report.metrics()["recall_50"] == 0.5
    assert report.behaviour.rates["unreadable"].of == 1
    assert report.behaviour.rates["stopped"] == Rate(1, 2)
    assert any("1 image could not be read (the first is b.png)" in note for note in report.notes)


def test_unfinished_predictions_go_on_where_they_were_cut(tmp_path):
    request = {"model": "m", "prompt": "p"}
    unfinished = UnfinishedPredictions(tmp_path / "preds.json", request)
    unfinished.begin()
    unfinished.begin()  # no answer was lost
    unfinished.add(ANSWERS)
    with unfinished.path.open("ab") as file:
        file.write(b'{"image_id": 9, "ima')
    assert UnfinishedPredictions(tmp_path / "preds.json", request).resume() == list(ANSWERS)
    unfinished.keep(ANSWERS[:1])
    unfinished.add(ANSWERS[1:])
    assert unfinished.resume() == list(ANSWERS)
    with pytest.raises(DataError, match=r"interrupted\n  add --resume"):
        unfinished.begin()
    with pytest.raises(DataError, match="made with another prompt: prompt 'p' is now 'q'\n"):
        UnfinishedPredictions(tmp_path / "preds.json", request | {"prompt": "q"}).resume()
    with pytest.raises(DataError, match=r"made with another dedup: dedup None is now 0\.9\n"):
        UnfinishedPredictions(tmp_path / "preds.json", request | {"dedup": 0.9}).resume()
    with pytest.raises(DataError, match="made with another prompt: prompt 'p' is now None\n"):
        UnfinishedPredictions(tmp_path / "preds.json", {"model": "m"}).resume()
    unfinished.path.write_text("")
    with pytest.raises(DataError, match="made with another model and another prompt"):
        unfinished.resume()
