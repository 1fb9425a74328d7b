"""Sampled answers: the best of k by the labels, the union of all, and the file that they are read from."""

import json
from dataclasses import replace

import pytest

from coordexp.evaluate import evaluate, write_predictions
from coordexp.evaluate.predictions import read_samples, samples_path, write_samples
from coordexp.evaluate.samples import evaluate_samples
from tests.unit.evaluate.scenes import BOX, FAR, answer, crowd, prediction, record

THIRD = (400, 100, 500, 200)
CAT, DOG, CUP = prediction("cat", BOX), prediction("dog", FAR), prediction("cup", THIRD)
TRUTH = [(1, record(("cat", BOX), ("dog", FAR), ("cup", THIRD)))]


def shares(counts):
    return counts.f1, counts.precision, counts.recall


def test_the_best_is_chosen_among_the_first_k_samples_by_f1():
    samples = [[answer(CAT)], [answer(CAT, DOG)], [answer()], [answer(CAT, DOG, CUP)]]
    report = evaluate_samples(TRUTH, [answer(CAT)], samples)
    assert {k: counts.with_class.pairs for k, counts in report.best.items()} == {1: 1, 2: 2, 4: 3}
    assert report.greedy.with_class.pairs == 1


def test_the_best_is_chosen_in_each_image_alone():
    truth = [(1, record(("cat", BOX))), (2, record(("dog", FAR), image="b.png"))]
    right, wrong = {1: CAT, 2: DOG}, {1: DOG, 2: CAT}
    names = {1: "a.png", 2: "b.png"}
    first = [answer(right[1], image_id=1), answer(wrong[2], image_id=2, image=names[2])]
    second = [answer(wrong[1], image_id=1), answer(right[2], image_id=2, image=names[2])]
    report = evaluate_samples(truth, first, [first, second])
    assert shares(report.best[1].with_class) == (0.5, 0.5, 0.5)
    assert shares(report.best[2].with_class) == (1.0, 1.0, 1.0)


def test_false_positives_count_so_the_longest_answer_is_not_the_best():
    ghosts = [prediction("ghost", (700, 10 + 60 * k, 750, 60 + 60 * k)) for k in range(9)]
    report = evaluate_samples(TRUTH, [answer()], [[answer(CAT, DOG, CUP, *ghosts)], [answer(CAT, DOG)]])
    assert shares(report.best[2].with_class) == pytest.approx((0.8, 1.0, 2 / 3))


def test_of_equal_samples_that_with_fewer_duplicates_is_taken():
    """Both have F1 2/3. The first repeats the cat, and the second has an object of a wrong class."""
    repeated, other = answer(CAT, CAT, DOG), answer(CAT, prediction("ghost", FAR), CUP)
    for samples in ([[repeated], [other]], [[other], [repeated]]):
        report = evaluate_samples(TRUTH, [answer()], samples)
        assert report.best[2].with_class.f1 == pytest.approx(2 / 3)
        assert report.best[2].any_class.pairs == 3, "the sample without a duplicate"


def test_an_empty_answer_to_an_image_without_objects_is_the_best():
    truth = [*TRUTH, (2, record(image="b.png"))]
    empty, ghost = answer(image_id=2, image="b.png"), answer(DOG, image_id=2, image="b.png")
    report = evaluate_samples(truth, [answer(), empty], [[answer(CAT), ghost], [answer(CAT), empty]])
    assert shares(report.best[1].with_class) == (0.4, 0.5, 1 / 3)
    assert shares(report.best[2].with_class) == (0.5, 1.0, 1 / 3)


def test_the_union_has_every_object_that_any_sample_has():
    wrong_class = prediction("ghost", THIRD)
    samples = [[answer(CAT)], [answer(DOG, DOG)], [answer(CAT, wrong_class)]]
    report = evaluate_samples(TRUTH, [answer()], samples)
    assert (report.union.value, report.union_any_class.value) == (pytest.approx(2 / 3), 1.0)
    assert report.best[3].with_class.recall == pytest.approx(1 / 3)


def test_the_counts_of_one_sample_are_those_of_an_evaluation_of_it():
    truth, answers = crowd(2)
    report, metrics = evaluate_samples(truth, answers, [answers]), evaluate(truth, answers).metrics()
    assert report.best[1] == report.greedy
    for name in ("f1", "precision", "recall"):
        assert getattr(report.greedy.with_class, name) == metrics[f"{name}_50"]
        assert getattr(report.greedy.any_class, name) == metrics[f"{name}_50_any_class"]
    assert report.union.value == metrics["recall_50"]


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
