"""Native answers in evaluation: their scores, their files, and when they count as unreadable."""

import json
import math

import pytest

from coordexp.answers.formats import NativeAnswers
from coordexp.data import Record
from coordexp.data.records import RecordObject
from coordexp.evaluate import evaluate, read_predictions, write_predictions
from coordexp.evaluate.answer import build_answer
from coordexp.rollout.backend import Rollout
from tests.vocabularies import encode, table

QWEN = table("qwen")
SECOND = '{"bbox_2d": [500, 500, 1000, 1000], "label": "dog"}'
ANSWER = '```json\n[\n\t{"bbox_2d": [%s], "label": "cup"},\n\t' + SECOND + "\n]\n```"
TEXT = ANSWER % "0, 0, 250, 500"
CUP, DOG = RecordObject("cup", "bbox_2d", (0, 0, 20, 40)), RecordObject("dog", "bbox_2d", (40, 40, 80, 80))
TRUTH = [(7, Record("a.png", 80, 80, "pixel", (CUP, DOG)))]


def answer(text, probabilities=None):
    """Return the built answer. `probabilities` are those of tokens, by their text; all others are certain."""
    ids = encode(text, QWEN)
    chosen = probabilities or {}
    logprobs = [math.log(chosen.get(QWEN.bytes_of([id]).decode(errors="replace"), 1.0)) for id in ids]
    return build_answer(7, "a.png", Rollout.of(QWEN, (), ids, logprobs, "stop"), NativeAnswers(QWEN))


def test_a_native_answer_is_evaluated_in_the_same_bins_and_pixels():
    report = evaluate(TRUTH, [answer(TEXT)])
    assert report.metrics()["f1_50"] == 1.0
    assert report.metrics()["unreadable"] == 0.0
    assert evaluate(TRUTH, [answer(ANSWER % "0, 0, 1001, 500")]).metrics()["invalid"] == 0.5


def test_a_score_is_the_probability_of_the_words_and_of_the_choice_to_go_on():
    built = answer(TEXT, {"cup": 0.5, '"},\n': 0.25})
    assert [item.score for item in built.objects] == pytest.approx([0.5, 0.25])


def test_predictions_remember_the_format_and_are_read_again(tmp_path):
    file = tmp_path / "preds.json"
    write_predictions(file, [answer(TEXT)], TRUTH)
    assert json.loads(file.with_suffix(".answers.jsonl").read_text())["answer_format"] == "native"
    assert read_predictions(file, TRUTH) == (answer(TEXT),)
    boxes = [pytest.approx([0, 0, 20, 40], abs=0.08), pytest.approx([40, 40, 40, 40], abs=0.08)]
    assert [item["bbox"] for item in json.loads(file.read_text())] == boxes  # half a bin is 0.04 pixels


def test_prose_is_unreadable_and_an_empty_list_is_not():
    assert evaluate(TRUTH, [answer("There is nothing here.")]).metrics()["unreadable"] == 1.0
    assert evaluate(TRUTH, [answer("```json\n[]\n```")]).metrics()["unreadable"] == 0.0
