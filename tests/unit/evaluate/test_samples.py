"""The file of sampled answers."""

import json
from dataclasses import replace

import pytest

from coordexp.evaluate import write_predictions
from coordexp.evaluate.predictions import read_samples, samples_path, write_samples
from tests.unit.evaluate.scenes import BOX, FAR, answer, prediction, record

THIRD = (400, 100, 500, 200)
CAT, DOG, CUP = prediction("cat", BOX), prediction("dog", FAR), prediction("cup", THIRD)
TRUTH = [(1, record(("cat", BOX), ("dog", FAR), ("cup", THIRD)))]


@pytest.fixture
def predictions(tmp_path):
    path = tmp_path / "preds.json"
    write_predictions(path, [answer(CAT)], TRUTH)
    return path


def test_samples_are_read_as_they_were_written(predictions):
    samples = [replace(answer(CAT, DOG), sample=1), replace(answer(CUP), sample=2, dropped=(DOG,))]
    write_samples(predictions, samples)
    assert read_samples(predictions, 2, [1]) == [samples[:1], samples[1:]]
    assert read_samples(predictions, 1, [1]) == [samples[:1]]
    lines = [json.loads(line) for line in samples_path(predictions).read_text().splitlines()]
    assert [line["sample"] for line in lines] == [1, 2]
    assert [item["desc"] for item in lines[1]["dropped"]] == ["dog"] and "dropped" not in lines[0]
