"""`coordexp data audit` and `evaluate --judged` on drawn scenes, of which some labels are removed. Answers to them
have a part of the true objects, and a person who knows these decides about the suggestions."""

import json
import random
import re

import pytest
from typer.testing import CliRunner

from coordexp.cli import app
from coordexp.data import RecordFile
from coordexp.detect.suggestions import read_suggestions
from coordexp.evaluate import AnswerObject, ImageAnswer, read_predictions, read_truth, write_predictions

REMOVED = 0.4


def run(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def write_answers(folder, name, share):
    """Write answers that have a share of all objects, and a wrong one in every other image."""
    rng = random.Random(name)
    truth = read_truth(RecordFile(folder / "scenes/val.jsonl"))
    answers = []
    for number, (image_id, record) in enumerate(truth):
        found = [(item.desc, item.kind, record.in_bins(item)) for item in record.objects if rng.random() < share]
        if number % 2 and record.objects:
            found.append((record.objects[0].desc, "bbox_2d", (0, 0, 40, 40)))
        objects = tuple(AnswerObject(*item, round(rng.random(), 3), None) for item in found)
        answers.append(ImageAnswer(image_id, record.image, "{}", "stop", 10, objects))
    labelled = read_truth(RecordFile(folder / "scenes/thin.jsonl"))
    (folder / name).mkdir()
    write_predictions(folder / name / "preds.json", answers, labelled)


def decide(folder, name, count):
    """Decide about the first suggestions, and return how many are right and how many there are."""
    true = {
        (image_id, item.desc, record.in_bins(item))
        for image_id, record in read_truth(RecordFile(folder / "scenes/val.jsonl"))
        for item in record.objects
    }
    records = dict(read_truth(RecordFile(folder / "scenes/thin.jsonl")))
    file = read_suggestions(folder / name / "suggestions.jsonl")
    is_right = [
        (item.image_id, item.item.desc, records[item.image_id].in_bins(item.item)) in true
        for item in file.suggestions
    ]
    decisions = {str(k + 1): "accept" if right else "reject" for k, right in enumerate(is_right[:count])}
    content = {"format": 1, "suggestions": file.sha256, "decisions": decisions}
    (folder / name / "decisions.json").write_text(json.dumps(content))
    return sum(is_right), len(is_right)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Judged suggestions of two models."""
    folder = tmp_path_factory.mktemp("audit")
    run("demo", "scenes", "--out", folder / "scenes", "--train", 1, "--val", 40, "--objects", "3-8", "--side", 128)
    thin = folder / "scenes/thin.jsonl"
    run("data", "thin", folder / "scenes/val.jsonl", "--remove", REMOVED, "--out", thin)
    for name, share in (("a", 0.5), ("b", 0.9)):
        write_answers(folder, name, share)
        preds = folder / name / "preds.json"
        run("data", "suggest", "--data", thin, "--preds", preds, "--shuffle", "--out", folder / name)
        decide(folder, name, 60)
    return folder


def read_number(pattern, text):
    found = re.search(pattern, text)
    assert found, text
    return [float(number) for number in found.groups()]


def test_the_audit_prints_the_labelled_share_and_the_closing_weight(folder):
    labels = [
        sum(len(record.objects) for _, record in read_truth(RecordFile(folder / f"scenes/{name}.jsonl")))
        for name in ("thin", "val")
    ]
    printed = run("data", "audit", folder / "b", "--data", folder / "scenes/thin.jsonl")
    value, low, high = read_number(r"labelled share: (\S+) \(95 %: (\S+) to (\S+)\)", printed)
    assert low < labels[0] / labels[1] < high and high - low < 0.25
    assert read_number(r"closing_weight: (\S+)", printed) == [round(value, 1)]
    assert read_number(r"(\d+) labels in (\d+) images", printed) == [labels[0], 40]
    for name in ("small", "medium", "large", "by size", "by crowding", "by class"):
        assert name in printed


def test_evaluate_estimates_the_quality_against_all_objects_from_judgements(folder):
    thin, out, preds = folder / "scenes/thin.jsonl", folder / "report.json", folder / "b/preds.json"
    printed = run("evaluate", "--data", thin, "--preds", preds, "--judged", folder / "b", "--out", out)
    report = json.loads(out.read_text())
    assert (f"judge {report['more']:,} more" if report["more"] else "judge more images") in printed
    run("evaluate", "--data", folder / "scenes/val.jsonl", "--preds", preds_on_all(folder, "b"), "--out", out)
    complete = measures(json.loads(out.read_text()))
    for name, estimate in report["estimates"].items():
        assert estimate["low"] < complete[name] < estimate["high"]
    assert measures(report)["precision"] < report["estimates"]["precision"]["low"]


def measures(report):
    return report["thresholds"][0]["with_class"]


def preds_on_all(folder, name):
    """Write the answers again, for the complete labels."""
    truth = read_truth(RecordFile(folder / "scenes/thin.jsonl"))
    answers = read_predictions(folder / name / "preds.json", truth)
    write_predictions(folder / "complete.json", answers, read_truth(RecordFile(folder / "scenes/val.jsonl")))
    return folder / "complete.json"


def test_a_labelled_share_stands_in_for_judgements(folder):
    preds, out = folder / "b/preds.json", folder / "share.json"
    run(
        "evaluate",
        "--data",
        folder / "scenes/thin.jsonl",
        "--preds",
        preds,
        "--labelled-share",
        0.5,
        0.7,
        "--out",
        out,
    )
    report = json.loads(out.read_text())
    assert report["estimates"]["precision"]["value"] == pytest.approx(measures(report)["precision"] / 0.6)
    assert report["estimates"]["recall"]["value"] == pytest.approx(measures(report)["recall"])


def test_the_best_suggestions_do_not_stand_for_all(folder):
    out = folder / "sorted"
    thin = folder / "scenes/thin.jsonl"
    run("data", "suggest", "--data", thin, "--preds", folder / "a/preds.json", "--out", out)
    _, count = decide(folder, "sorted", 5)
    audit = ["data", "audit", out, "--data", thin, "--preds", folder / "a/preds.json"]
    result = CliRunner().invoke(app, [*map(str, audit)])
    assert result.exit_code == 1 and f"{count - 5} of {count}" in result.output.replace("\n", " ")
    decide(folder, "sorted", count)
    run(*audit)


def test_judgements_about_other_predictions_are_refused(folder):
    arguments = ["evaluate", "--data", folder / "scenes/thin.jsonl", "--preds", folder / "a/preds.json"]
    result = CliRunner().invoke(app, [*map(str, arguments), "--judged", str(folder / "b")])
    assert result.exit_code == 1 and "no object of the predictions" in result.output.replace("\n", " ")
