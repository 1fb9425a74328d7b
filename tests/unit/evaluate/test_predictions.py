"""Predictions on disk: what is written reads back, and what breaks a rule is named."""

import json
from dataclasses import replace

import pytest

from coordexp.data import Geometry
from coordexp.evaluate import (
    Answer,
    AnswerObject,
    PredictionError,
    check_predictions,
    read_predictions,
    write_predictions,
)
from coordexp.parse import PredictedObject, Reason
from tests.unit.evaluate.scenes import BOX, FAR, answer, record, refused, said

POLY = (10, 20, 110, 20, 60, 220)
TRUTH = [
    (1, record(("dog", BOX), ("cat", FAR))),
    (3, record(("leaf", POLY), image="b.png", width=500, height=250)),
]
ANSWERS = (
    answer(said("cat", FAR, 0.25), refused(), said("unicorn", BOX, 1.0), text='{"a": "\u732b</script>\n"'),
    answer(said("leaf", POLY), image_id=3, image="b.png", finish="length"),
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


def test_an_object_is_taken_from_the_parser_as_it_is():
    sound = PredictedObject("object_1", 1, "cat", Geometry("bbox_2d", BOX), (4, 5, 6, 7), None)
    broken = PredictedObject("object_2", 2, "cat", None, (), Reason.degenerate)
    assert AnswerObject.of(sound, 0.5) == said("cat", BOX)
    assert AnswerObject.of(broken, None) == AnswerObject("cat", None, None, None, "degenerate")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bins": None}, "needs a reason"),
        ({"desc": None}, "needs a reason"),
        ({"bins": (1, 2, 3)}, "has 3 bins; a box has 4"),
        ({"bins": (5, 5, 5, 9)}, "has no area"),
        ({"bins": (5, 5, 1000, 9)}, "leaves the bins 0 to 999"),
        ({"score": float("nan")}, "score nan is not a finite number"),
    ],
)
def test_a_valid_object_cannot_be_without_a_sound_shape(change, words):
    with pytest.raises(ValueError, match=words):
        replace(said("cat", BOX), **change)


def test_a_valid_object_without_a_score_cannot_be_written(tmp_path):
    with pytest.raises(PredictionError, match=r"image_id 1: 'cat' has no score[\s\S]*token probabilities"):
        write_predictions(tmp_path / "preds.json", [answer(said("cat", BOX, None))], TRUTH)
    assert not (tmp_path / "preds.json").exists()


def test_an_answer_to_no_image_of_the_data_cannot_be_written(tmp_path):
    with pytest.raises(PredictionError, match=r"image_id 2 .* is not in the data"):
        write_predictions(tmp_path / "preds.json", [answer(image_id=2)], TRUTH)


LINE = {"image_id": 1, "image": "a.png", "text": "{}", "finish_reason": "stop", "tokens": 3, "objects": []}
OBJECT = {"desc": "cat", "kind": "bbox_2d", "bins": list(BOX), "score": 0.5, "reason": None}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Expecting property name"),
        ("[]", "not a JSON object"),
        (json.dumps(LINE | {"extra": 1}), "unknown extra"),
        (json.dumps({"image_id": 1}), "no finish_reason, image, objects, text, tokens"),
        (json.dumps(LINE | {"image_id": 0}), "image_id 0 is not a whole number from 1"),
        (json.dumps(LINE | {"image_id": True}), "image_id True is not a whole number"),
        (json.dumps(LINE | {"tokens": 1.5}), "tokens 1.5 is not a whole number from 0"),
        (json.dumps(LINE | {"text": None}), "text None is not a text"),
        (json.dumps(LINE | {"objects": {}}), "objects is not a list"),
        (json.dumps(LINE | {"objects": [OBJECT, 3]}), r"objects\[1\]: not a JSON object"),
        (json.dumps(LINE | {"objects": [OBJECT | {"kind": "box"}]}), "kind 'box' is not one of bbox_2d, poly"),
        (json.dumps(LINE | {"objects": [OBJECT | {"bins": [1.0, 2, 3, 4]}]}), "not a list of whole numbers"),
        (json.dumps(LINE | {"objects": [OBJECT | {"score": "high"}]}), "score 'high' is not a number"),
        (json.dumps(LINE | {"objects": [OBJECT | {"reason": 3}]}), "reason 3 is not a text"),
        (json.dumps(LINE | {"objects": [OBJECT | {"bins": [9, 9, 1, 1]}]}), "has no area"),
    ],
)
def test_a_broken_line_is_named(written, line, words):
    beside = written.with_suffix(".answers.jsonl")
    beside.write_text(f"\n{line}\n")
    with pytest.raises(PredictionError, match=rf"preds\.answers\.jsonl:2: .*{words}"):
        read_predictions(written)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"score": None}, "score None is not a number"),
        ({"bbox": [1, 2, 3]}, "is not four numbers"),
        ({"segmentation": [[1, "2"]]}, "not a list of rings"),
        ({"category_id": -1}, "category_id -1 is not a whole number from 0"),
        ({"area": 3}, "unknown area"),
    ],
)
def test_a_broken_detection_is_named(written, change, words):
    detections = json.loads(written.read_text())
    written.write_text(json.dumps([detections[0], detections[1] | change]))
    with pytest.raises(PredictionError, match=rf"preds\.json: \[1\]: .*{words}"):
        read_predictions(written)


def test_a_file_that_is_missing_cut_off_or_no_list_is_named(written):
    text = written.read_text()
    written.write_text(text[:40])
    with pytest.raises(PredictionError, match=r"preds\.json: "):
        read_predictions(written)
    written.write_text("{}")
    with pytest.raises(PredictionError, match="not a list"):
        read_predictions(written)
    written.with_suffix(".answers.jsonl").unlink()
    with pytest.raises(PredictionError, match=r"preds\.answers\.jsonl: no such file[\s\S]*two files"):
        read_predictions(written)


def test_two_answers_to_one_image_are_refused(written):
    beside = written.with_suffix(".answers.jsonl")
    beside.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE) + "\n")
    with pytest.raises(PredictionError, match=r":2: image_id 1 is on line 1 already"):
        read_predictions(written)


def test_files_of_two_runs_are_told_apart(written):
    predictions = read_predictions(written)
    with pytest.raises(PredictionError, match="2 detections, but 3 valid objects"):
        check_predictions(replace(predictions, detections=predictions.detections[1:]), TRUTH)
    changed = (replace(predictions.detections[0], score=0.3), *predictions.detections[1:])
    with pytest.raises(PredictionError, match=r"detection \[0\][\s\S]*do not belong together"):
        check_predictions(replace(predictions, detections=changed), TRUTH)
    wider = [(1, replace(TRUTH[0][1], width=500)), TRUTH[1]]
    with pytest.raises(PredictionError, match=r"detection \[0\][\s\S]*do not belong together"):
        check_predictions(predictions, wider)


def test_an_answer_knows_what_is_valid_and_whether_it_was_cut():
    cut = Answer(1, "a.png", "{", "length", 3, (said("cat", BOX), refused()))
    assert cut.valid == (said("cat", BOX),)
    assert cut.truncated
    assert not answer().truncated
