"""`coordexp data suggest`, `data complete` and `data export labelstudio`, with predictions from a file."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from PIL import Image

from coordexp.data import RecordFile, read_records
from coordexp.detect.suggestions import read_suggestions
from coordexp.evaluate import read_truth, write_predictions
from coordexp.evaluate.predictions import write_samples
from tests.command import run
from tests.unit.evaluate.scenes import BOX, FAR, answer, prediction, record

THIRD = (400, 100, 500, 200)


@pytest.fixture
def folder(tmp_path):
    """A data set of two images, and predictions with two objects that have no label."""
    for name in ("a.png", "b.png"):
        Image.new("RGB", (99, 99), "teal").save(tmp_path / name)
    records = [record(("cat", BOX)), record(("dog", BOX), image="b.png")]
    (tmp_path / "train.jsonl").write_text("".join(item.as_json() + "\n" for item in records))
    answers = [
        answer(prediction("cat", BOX, 0.9), prediction("dog", FAR, 0.8), prediction("<b>", THIRD, 0.9)),
        answer(prediction("cat", FAR, 0.4), image_id=2, image="b.png"),
    ]
    write_predictions(tmp_path / "preds.json", answers, read_truth(RecordFile(tmp_path / "train.jsonl")))
    return tmp_path


def suggest(folder, *more, code=0):
    files = ["--data", folder / "train.jsonl", "--preds", folder / "preds.json", "--out", folder / "out"]
    return run("data", "suggest", *files, *more, code=code)


def complete(folder, *more, code=0):
    files = ["--data", folder / "train.jsonl", "-s", folder / "out/suggestions.jsonl"]
    return run("data", "complete", *files, "--out", folder / "new.jsonl", *more, code=code)


def test_suggestions_and_their_page_are_written(folder):
    result = suggest(folder)
    assert "4 predicted objects in 2 images: 1 explained by a label, 0 repeat a better one" in result.stdout
    assert "1 have a class that no label has and were left out (--new-classes): <b>" in result.stdout
    assert "2 suggestions" in result.stdout
    suggestions = read_suggestions(folder / "out/suggestions.jsonl").suggestions
    assert [(item.item.desc, item.score) for item in suggestions] == [("dog", 0.8), ("cat", 0.4)]
    assert (folder / "out/complete.html").is_file()


def test_labels_that_a_person_accepted_are_added(folder):
    suggest(folder)
    sha256 = read_suggestions(folder / "out/suggestions.jsonl").sha256
    decisions = {"format": 1, "suggestions": sha256, "decisions": {"1": "reject", "2": "accept"}}
    (folder / "decisions.json").write_text(json.dumps(decisions))
    result = complete(folder, "--decisions", folder / "decisions.json", "--accept-above", "0.5")
    assert "1 labels added; 1 suggestions were rejected, 0 are undecided" in result.stdout
    objects = [len(record.objects) for _, record in read_records(folder / "new.jsonl")]
    assert objects == [1, 2]


def test_samples_beside_the_predictions_lower_the_score_of_what_they_lack(folder):
    samples = [answer(prediction("dog", FAR, 0.6)), answer(image_id=2, image="b.png")]
    write_samples(folder / "preds.json", [replace(item, sample=1) for item in samples])
    suggest(folder, "--samples", "1")
    suggestions = read_suggestions(folder / "out/suggestions.jsonl").suggestions
    assert [(item.item.desc, item.agreement) for item in suggestions] == [("dog", 1.0), ("cat", 0.5)]


def test_nothing_is_overwritten(folder):
    suggest(folder)
    assert "out/suggestions.jsonl exists" in suggest(folder, code=1).output
    complete(folder, "--accept-above", "0")
    before = (folder / "new.jsonl").read_text()
    assert "new.jsonl exists" in complete(folder, "--accept-above", "1", code=1).output
    assert (folder / "new.jsonl").read_text() == before


def test_an_export_overwrites_nothing_and_refuses_options_without_effect(folder):
    words = ("data", "export", "labelstudio", folder / "train.jsonl", "--out")
    run(*words, folder / "tasks.json")
    assert "tasks.json exists" in run(*words, folder / "tasks.json", code=1).output
    (folder / "other.xml").touch()
    assert "other.xml exists" in run(*words, folder / "other.json", code=1).output
    assert "--only-suggested has no effect" in run(*words, folder / "x.json", "--only-suggested", code=1).output


def test_suggesting_from_predictions_imports_no_torch(folder):
    words = ["data", "suggest", "--data", "train.jsonl", "--preds", "preds.json", "--out", "out"]
    code = f"import sys; from coordexp.cli import app; app({words!r}, standalone_mode=False)"
    code += "; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"
