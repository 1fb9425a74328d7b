"""Precision, recall and F1, counted by hand on images small enough for that."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from coordexp.evaluate import evaluate
from coordexp.evaluate.comparison import compare_images
from coordexp.evaluate.matching import THRESHOLDS, match_image
from tests.unit.evaluate.scenes import BOX, EDGE, FAR, answer, crowd, prediction, record


def metrics(true, predicted):
    return evaluate([(1, record(*true))], [answer(*predicted)]).metrics()


def test_a_wrong_class_counts_only_without_class():
    got = metrics([("cat", BOX)], [prediction("dog", BOX)])
    assert got["f1_50"] == 0.0
    assert got["f1_50_any_class"] == 1.0
    assert got["mean_iou_any_class"] == 1.0
    assert "mean_iou" not in got


def test_iou_decides_at_which_thresholds_a_box_counts():
    got = metrics([("cat", (0, 0, 100, 100))], [prediction("cat", (0, 0, 100, 72))])
    assert got["f1_50"] == 1.0
    assert got["f1_95"] == 0.0
    assert got["f1"] == pytest.approx(0.5)  # at 0.50, 0.55, 0.60, 0.65 and 0.70
    assert got["mean_iou"] == pytest.approx(0.72)
    assert metrics([("cat", (0, 0, 100, 100))], [prediction("cat", (0, 0, 100, 50))])["f1_50"] == 1.0


def test_of_equally_many_pairs_those_of_larger_iou_are_made():
    true, predicted = (
        [("cat", (0, 0, 100, 100))],
        [prediction("cat", (0, 0, 60, 100)), prediction("cat", (0, 0, 90, 100))],
    )
    got = metrics(true, predicted)
    assert got["mean_iou"] == pytest.approx(0.9)
    assert got["precision_50"] == 0.5


@pytest.mark.parametrize("seed", range(3))
def test_no_other_assignment_has_more_pairs(seed):
    for image in compare_images(*crowd(seed)):
        for pairs, threshold in zip(match_image(image).any_class, THRESHOLDS, strict=True):
            most = maximum_bipartite_matching(csr_array(image.overlap >= threshold)) if image.overlap.size else []
            assert len(pairs) == sum(column >= 0 for column in most)


def test_f1_does_not_depend_on_scores_or_order():
    truth, answers = crowd(4)
    own = evaluate(truth, answers).metrics()
    reversed_answers = [replace(answer, objects=answer.objects[::-1]) for answer in answers]
    equal = [
        replace(answer, objects=tuple(replace(item, score=1.0) for item in answer.objects)) for answer in answers
    ]
    for other in (equal, reversed_answers):
        got = evaluate(truth, other).metrics()
        assert {k: v for k, v in got.items() if "f1_" in k and "best" not in k} == {
            k: v for k, v in own.items() if "f1_" in k and "best" not in k
        }


def test_a_polygon_is_compared_by_its_mask_and_a_box_with_it_as_a_rectangle():
    diamond = (200, 0, 400, 200, 200, 400, 0, 200)
    got = metrics([("leaf", diamond)], [prediction("leaf", (0, 0, 400, 400))])
    assert got["mean_iou"] == pytest.approx(0.5, abs=0.01)
    assert metrics([("leaf", diamond)], [prediction("leaf", diamond)])["f1_95"] == 1.0


def test_each_class_has_its_own_row_and_unknown_ones_are_in_the_total_only():
    truth = [(1, record(("cat", BOX), ("dog", FAR)))]
    report = evaluate(
        truth, [answer(prediction("cat", BOX), prediction("cat", FAR), prediction("ghost", (0, 0, 9, 9)))]
    )
    assert list(report.classes) == ["cat", "dog"]
    assert report.classes["cat"].at(0.5).precision == 0.5
    assert report.classes["dog"].at(0.5).recall == 0.0
    assert report.classes["dog"].at(0.5).precision is None
    assert report.with_class.at(0.5).precision == pytest.approx(1 / 3)


def test_the_rows_of_the_classes_add_up_to_the_total():
    truth, answers = crowd(7)
    report = evaluate(truth, answers)
    for k, total in enumerate(report.with_class.per_threshold):
        rows = [scores.per_threshold[k] for scores in report.classes.values()]
        assert sum(row.pairs for row in rows) == total.pairs
        assert sum(row.true for row in rows) == total.true
    ghosts = report.behaviour.rates["unknown_class"].count
    assert sum(row.predicted for row in rows) + ghosts == total.predicted


def test_every_point_of_the_curve_is_the_f1_of_the_objects_above_it():
    truth, answers = crowd(8, ties=True)
    curve = evaluate(truth, answers).curve
    assert [point.score for point in curve] == sorted({point.score for point in curve}, reverse=True)
    for point in curve:
        kept = [
            replace(given, objects=tuple(item for item in given.objects if item.score >= point.score))
            for given in answers
        ]
        assert evaluate(truth, kept).with_class.at(0.5) == point.counts


def test_an_image_with_nothing_true_and_nothing_predicted_is_not_scored():
    report = evaluate([(1, record())], [answer()])
    assert "f1_50" not in report.metrics()
    assert report.notes == ("no AP: the data has no true object",)


@pytest.mark.parametrize("seed", range(8))
def test_wrong_names_are_the_most_unmatched_objects_that_can_be_paired_in_place_and_never_have_the_same_name(seed):
    truth, answers = crowd(seed, shapes=("bbox_2d", "poly"))
    renamed = [
        replace(answer, objects=tuple(replace(item, desc="cat") for item in answer.objects)) for answer in answers
    ]
    images = evaluate(truth, renamed).images
    assert sum(len(image.wrong_names) for image in images) > 10
    for image in images:
        comparison, pairs = image.comparison, image.wrong_names
        found, true = [{pair[side] for pair in pairs} for side in (0, 1)]
        assert len(found) == len(true) == len(pairs)
        assert found <= set(image.false_positives) and true <= set(image.missed_objects)
        assert all(comparison.predicted[i].desc != comparison.true[j].desc for i, j in pairs)
        assert all(comparison.overlap[i, j] >= 0.5 for i, j in pairs)
        left = comparison.overlap[np.ix_(image.false_positives, image.missed_objects)] >= 0.5
        assert len(pairs) == (maximum_bipartite_matching(csr_array(left)) >= 0).sum()


def test_a_repeated_wrong_name_is_counted_once_and_the_most_frequent_pairs_come_first():
    names = [f"class {k}" for k in range(12)]
    truth = [(k, record(("cat", BOX), image=f"{k}")) for k in range(1, 16)]
    answers = [
        answer(*[prediction(names[max(0, k - 4)], BOX)] * 2, image_id=k, image=f"{k}") for k in range(1, 16)
    ]
    report = evaluate(truth, answers)
    listed = report.as_dict()["wrong_names"]
    assert listed[0] == {"true": "cat", "written": "class 0", "count": 4}
    assert [row["count"] for row in listed[1:]] == [1] * 9
    assert report.with_class.at(0.5).pairs == 0


def test_a_crowd_of_a_thousand_boxes_is_scored():
    rows = [("cell", (x, y, x + 20, y + 20)) for x, y in itertools.product(range(0, 960, 30), repeat=2)]
    report = evaluate([(1, record(*rows))], [answer(*[prediction(d, b) for d, b in rows[::-1]])])
    assert report.with_class.at(0.95).pairs == len(rows) == 1024
    assert np.isclose(report.metrics()["mean_iou"], 1.0)
    assert max(max(b) for _, b in rows) < EDGE
