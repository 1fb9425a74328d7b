"""`coordexp data audit` and `evaluate --judged` on drawn scenes, of which some labels are removed. Answers to them
have a part of the true objects, and a person who knows these decides about the suggestions."""

import json
import random
import re

import pytest

from coordexp.data import RecordFile
from coordexp.detect.suggestions import fix_order, read_suggestions
from coordexp.evaluate import AnswerObject, ImageAnswer, read_predictions, read_truth, write_predictions
from tests.command import run

REMOVED = 0.4


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


def read_objects(file):
    """Return the records by image_id, and their objects by image_id, desc and bins."""
    records = dict(read_truth(RecordFile(file)))
    pairs = [(id, record, item) for id, record in records.items() for item in record.objects]
    return records, {(id, item.desc, record.in_bins(item)): item for id, record, item in pairs}


def decide(folder, name, count, complete=()):
    """Decide about the first suggestions, and add what complete images lack. Return how many suggestions are
    right and how many there are."""
    _, true = read_objects(folder / "scenes/val.jsonl")
    records, labels = read_objects(folder / "scenes/thin.jsonl")
    file = read_suggestions(folder / name / "suggestions.jsonl")
    places = [(one.image_id, one.item.desc, records[one.image_id].in_bins(one.item)) for one in file.suggestions]
    is_right = [place in true for place in places]
    images = {str(id): {"image": records[id].image, "complete": True, "added": []} for id in complete}
    for id in complete:
        images[str(id)]["labels"] = len(records[id].objects)
        missed = [place for place in true if place[0] == id and place not in {*places, *labels}]
        images[str(id)]["added"] = [true[place].as_dict() for place in missed]
    decisions = {str(k + 1): "accept" if right else "reject" for k, right in enumerate(is_right[:count])}
    content = {"format": 1, "suggestions": file.sha256, "decisions": decisions, "images": images}
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
    printed = run("data", "audit", folder / "b", "--data", folder / "scenes/thin.jsonl").stdout
    value, low, high = read_number(r"labelled share: (\S+) \(95 %: (\S+) to (\S+)\)", printed)
    assert low < labels[0] / labels[1] < high and high - low < 0.25
    assert read_number(r"closing_weight: (\S+)", printed) == [round(value, 1)]
    assert read_number(r"(\d+) labels in (\d+) images", printed) == [labels[0], 40]
    for name in ("small", "medium", "large", "by size", "by crowding", "by class"):
        assert name in printed


def test_an_audit_of_few_objects_has_no_empty_headings(tmp_path):
    run("demo", "scenes", "--out", tmp_path / "scenes", "--train", 1, "--val", 3, "--objects", "2-2")
    thin = tmp_path / "scenes/thin.jsonl"
    run("data", "thin", tmp_path / "scenes/val.jsonl", "--remove", REMOVED, "--out", thin)
    write_answers(tmp_path, "a", 1.0)
    run("data", "suggest", "--data", thin, "--preds", tmp_path / "a/preds.json", "--out", tmp_path / "a")
    decide(tmp_path, "a", 10)
    printed = run("data", "audit", tmp_path / "a", "--data", thin).stdout
    assert "labelled share" in printed and "by size" in printed
    assert "by class" not in printed and "too few objects" in printed


def test_evaluate_estimates_the_quality_against_all_objects_from_judgements(folder):
    thin, out, preds = folder / "scenes/thin.jsonl", folder / "report.json", folder / "b/preds.json"
    printed = run("evaluate", "--data", thin, "--preds", preds, "--judged", folder / "b", "--out", out).stdout
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
    truth, path = read_truth(RecordFile(folder / "scenes/thin.jsonl")), folder / f"complete-{name}.json"
    answers = read_predictions(folder / name / "preds.json", truth)
    write_predictions(path, answers, read_truth(RecordFile(folder / "scenes/val.jsonl")))
    return path


def test_a_labelled_share_stands_in_for_judgements(folder):
    report, printed = estimate_from_share(folder, 0.5, 0.7)
    assert report["estimates"]["precision"]["value"] == pytest.approx(measures(report)["precision"] / 0.6)
    assert report["estimates"]["recall"]["value"] == pytest.approx(measures(report)["recall"])
    assert "note" not in printed


def test_matches_that_a_labelled_share_makes_impossible_are_noted(folder):
    assert "note" in estimate_from_share(folder, 0.2, 0.3)[1]


def estimate_from_share(folder, low, high):
    data, preds, out = folder / "scenes/thin.jsonl", folder / "b/preds.json", folder / "share.json"
    printed = run("evaluate", "--data", data, "--preds", preds, "--labelled-share", low, high, "--out", out).stdout
    return json.loads(out.read_text()), printed


def compare(folder, data, preds, *more):
    out = folder / "difference.json"
    printed = run("evaluate", "--data", data, *both("--preds", preds), *more, "--out", out).stdout
    return json.loads(out.read_text()), printed


def both(option, paths):
    return [word for path in paths for word in (option, path)]


def test_two_models_are_compared_and_the_better_one_is_named(folder):
    complete, thin = folder / "scenes/val.jsonl", folder / "scenes/thin.jsonl"
    page = folder / "changes.html"
    true, printed = compare(folder, complete, [preds_on_all(folder, name) for name in "ab"], "--page", page)
    assert "Images that changed most" in page.read_text()
    assert true["differences"]["f1_50"]["image_interval"][0] > 0 and "use B" in printed
    judged = both("--judged", [folder / name for name in "ab"])
    report, printed = compare(folder, thin, [folder / name / "preds.json" for name in "ab"], *judged)
    assert report["differences"]["f1_50"]["is_biased"] and not report["differences"]["recall_50"]["is_biased"]
    for name, estimate in report["difference"]["estimates"].items():
        whole = true["differences"][f"{name}_50"]
        assert estimate["low"] < whole["other"] - whole["base"] < estimate["high"]
    assert report["difference"]["estimates"]["f1"]["low"] > 0 and "use B" in printed
    assert [set(quality["estimates"]) for quality in report["estimates"]] == [{"precision", "recall", "f1"}] * 2


def test_a_model_is_not_better_than_itself(folder):
    _, printed = compare(folder, folder / "scenes/thin.jsonl", [folder / "a/preds.json"] * 2)
    assert "no clear difference" in printed


def test_judgements_that_are_missing_are_reported_before_anything_is_read(folder):
    files = ["--data", folder / "scenes/thin.jsonl", "--preds", "none.json"]
    result = run("evaluate", *files, "--judged", folder, code=1)
    assert "suggestions.jsonl" in result.output and "none.json" not in result.output


@pytest.mark.parametrize("options", [["--judged", "a"], ["--preds", "a/preds.json"]])
def test_what_does_not_fit_two_predictions_is_refused(folder, options):
    option, path = options
    preds = both("--preds", [folder / "a/preds.json", folder / "b/preds.json"])
    arguments = ["evaluate", "--data", folder / "scenes/thin.jsonl", *preds, option, folder / path]
    assert " --preds and " in run(*arguments, code=1).output


def test_the_best_suggestions_do_not_stand_for_all(folder):
    out = folder / "sorted"
    thin = folder / "scenes/thin.jsonl"
    run("data", "suggest", "--data", thin, "--preds", folder / "a/preds.json", "--out", out)
    _, count = decide(folder, "sorted", 5)
    audit = ["data", "audit", out, "--data", thin, "--preds", folder / "a/preds.json"]
    result = run(*audit, code=1)
    assert f"{count - 5} of {count}" in result.output.replace("\n", " ")
    decide(folder, "sorted", count)
    run(*audit)


def test_in_complete_images_nothing_is_estimated(folder):
    out, thin, preds = folder / "complete", folder / "scenes/thin.jsonl", folder / "a/preds.json"
    run("data", "suggest", "--data", thin, "--preds", preds, "--out", out)
    audit = ["data", "audit", out, "--data", thin, "--preds", preds]
    images = fix_order(read_objects(thin)[0])[:20]
    for complete, count in ((images[1:], 1000), (images, 5)):  # not the first ones, and not decided
        decide(folder, "complete", count, complete)
        run(*audit, code=1)
    decide(folder, "complete", 1000, images)
    counted = (read_objects(folder / f"scenes/{name}.jsonl")[1] for name in ("thin", "val"))
    labels, true = (sum(place[0] in images for place in places) for places in counted)
    printed = run(*audit).stdout
    assert read_number(r"(\d+) labels in (\d+) complete images", printed) == [labels, 20]
    assert read_number(r"labelled share: (\S+)", printed) == [round(labels / true, 2)]
    run("evaluate", "--data", thin, "--preds", preds, "--judged", out)


def test_judgements_about_other_predictions_are_refused(folder):
    arguments = ["evaluate", "--data", folder / "scenes/thin.jsonl", "--preds", folder / "a/preds.json"]
    result = run(*arguments, "--judged", folder / "b", code=1)
    assert "no object of the predictions" in result.output.replace("\n", " ")
