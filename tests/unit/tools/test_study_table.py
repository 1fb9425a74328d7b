"""The tables of the study, from answers that the tests invent."""

import json
from dataclasses import replace

import numpy as np
import pytest
from study_data import SIZES, make_scenes
from study_table import count_tokens, estimate_difference, sum_seconds, write_tables

from coordexp.data import RecordFile
from coordexp.evaluate import AnswerObject, ImageAnswer, read_truth, write_predictions


@pytest.fixture
def study(tmp_path):
    make_scenes(tmp_path / "scenes", replace(SIZES["trial"], train=2, held_out=80))
    return tmp_path


def answer(study, folder, every: int, *, wrong_desc: bool = False, twice: bool = False) -> None:
    """Write answers that have every `every`-th true object of each test image."""
    truth = read_truth(RecordFile(study / "scenes/test.jsonl"))
    answers = []
    for image_id, record in truth:
        objects = [
            AnswerObject("ghost" if wrong_desc else item.desc, "bbox_2d", record.in_bins(item), 0.5, None)
            for item in record.objects[::every]
        ] * (1 + twice)
        answers.append(ImageAnswer(image_id, record.image, "{}", "stop", 10, tuple(objects)))
    write_predictions(folder / "test/preds.json", answers, truth)


def add_arm(study, arm: str, seed: int, every: int, tokens: int = 0, regime: str = "missing-50", **other) -> None:
    folder = study / f"{regime}/{seed}/{arm}"
    answer(study, folder, every, **other)
    (folder / "run").mkdir()
    lines = [{"step": 1, "rollout/tokens": tokens}, {"step": 2, "rollout/tokens": tokens}]
    (folder / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_rows(text: str) -> list[dict[str, str]]:
    """Return the rows of all tables of a Markdown text, by their heads."""
    rows, head = [], None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            head = None
        elif head is None:
            head = ["name", *cells[1:]]
        elif set(cells) != {"---"}:
            rows.append(dict(zip(head, cells, strict=True)))
    return rows


def read_tables(study, against: str = "continued"):
    """Return the rows of the results and those of the differences of missing-50, by name."""
    rows = read_rows(write_tables(study, ["missing-50"], "test", against))
    results = {row["name"]: row for row in rows if "seeds" in row}
    return results, {row["name"]: row for row in rows if "seeds" not in row}


def test_the_table_has_means_differences_costs_and_the_ceiling(study):
    for seed in range(3):
        add_arm(study, "continued", seed, every=2)
        add_arm(study, "recommended", seed, every=1 if seed else 2, tokens=500)
    add_arm(study, "continued", 0, every=1, regime="complete")
    answer(study, study / "before", every=3)
    results, differences = read_tables(study)
    assert list(results) == ["before the start", "continued", "recommended", "complete labels: continued"]
    assert results["continued"]["precision"] == "1.000 ± 0.000"
    assert results["continued"]["recall"].startswith("0.5") and results["continued"]["generated tokens"] == "0"
    assert results["recommended"]["generated tokens"] == "1,000" and results["recommended"]["seeds"] == "0, 1, 2"
    assert int(results["continued"]["skipped"].split()[0]) > 0
    assert list(differences) == ["before the start", "recommended", "complete labels: continued"]
    value, interval = differences["recommended"]["recall"].split(" [")
    gained = (1 - float(results["continued"]["recall"].split()[0])) * 2 / 3
    assert float(value) == pytest.approx(gained, abs=2e-3)
    low, high = map(float, interval.strip("]").split(" to "))
    assert low < 0 < gained < high  # one of the three seeds gained nothing


def test_only_seeds_that_both_have_are_compared(study):
    add_arm(study, "continued", 0, every=1)
    add_arm(study, "continued", 1, every=2)
    add_arm(study, "closing", 1, every=2)
    _, differences = read_tables(study)
    assert differences["closing"]["F1@0.5"] == "+0.000 [+0.000 to +0.000]"
    assert list(read_tables(study, against="closing")[1]) == ["continued"]


def test_the_interval_of_paired_seeds_holds_images_and_seeds():
    chooser = np.random.default_rng(1)

    def draw(rate: float):
        hits = chooser.random((400, 5)) < rate
        return {"recall_50": np.stack([hits.sum(axis=1), np.full(400, 5)], axis=1)}

    def width(*rates: float) -> float:
        value, (low, high) = estimate_difference([(draw(0.5), draw(rate)) for rate in rates], "recall_50")
        assert low < value < high
        return high - low

    one, agreeing, differing = width(0.7), width(0.7, 0.7, 0.7), width(0.6, 0.7, 0.8)
    assert 0.03 < one < 0.08 and agreeing < one < differing


@pytest.mark.slow
def test_the_interval_covers_the_difference_of_two_arms_of_the_same_quality():
    chooser, covered = np.random.default_rng(2), 0
    for _ in range(200):
        pairs = []
        for shift in chooser.normal(0, 0.05, 3):
            hits = chooser.random((2, 100, 5)) < np.array([0.5, 0.5 + shift])[:, None, None]
            pairs.append(tuple({"x": np.stack([side.sum(axis=1), np.full(100, 5)], axis=1)} for side in hits))
        low, high = estimate_difference(pairs, "x")[1]
        covered += low <= 0 <= high
    assert covered >= 180


def test_class_accuracy_and_duplicates(study):
    add_arm(study, "continued", 0, every=1)
    add_arm(study, "closing", 0, every=1, wrong_desc=True)
    add_arm(study, "recommended", 0, every=1, twice=True)
    results, _ = read_tables(study)
    assert results["continued"]["class accuracy"] == "1.000" and results["closing"]["class accuracy"] == "0.000"
    assert results["closing"]["recall, any class"] == "1.000"
    assert results["recommended"]["F1@0.5"] < results["recommended"]["F1, dedup"] == "1.000"


def test_costs_include_labelling_and_what_an_arm_builds_on_but_not_the_test(tmp_path):
    for number, tokens in ((1, 10), (2, 30)):
        folder = tmp_path / f"self-training-{number}"
        (folder / "run").mkdir(parents=True)
        (folder / "found.samples.jsonl").write_text(f'{{"tokens": {tokens}}}\n' * 2)
        costs = [("found.samples.jsonl", 5.0), ("run/checkpoint-2/manifest.json", 2.0), ("test/preds.json", 9.0)]
        lines = [{"makes": makes, "seconds": seconds} for makes, seconds in costs]
        (folder / "seconds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert count_tokens(tmp_path / "self-training-1") == 20 and count_tokens(tmp_path / "self-training-2") == 80
    assert sum_seconds(tmp_path / "self-training-1") == 7 and sum_seconds(tmp_path / "self-training-2") == 14


def test_all_tokens_count_that_were_generated(tmp_path):
    lines = {
        "agreement": [{"step": 1, "rollout/tokens": 10, "rollout/unused_tokens": 30}],
        "grpo": [{"step": 1, "generated_tokens": 40}, {"step": 2, "generated_tokens": 90}],
        "start": [],
    }
    for name, logged in lines.items():
        (tmp_path / name / "run").mkdir(parents=True)
        text = "".join(json.dumps(line) + "\n" for line in logged)
        (tmp_path / name / "run/metrics.jsonl").write_text(text)
    assert [count_tokens(tmp_path / name) for name in lines] == [40, 90, 0]
