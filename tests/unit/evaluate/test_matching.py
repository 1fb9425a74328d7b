"""Precision, recall and F1, counted by hand on scenes small enough for that."""

import itertools

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from coordexp.evaluate import PredictionError, ScoreMode, evaluate, rescored
from coordexp.evaluate.curve import best_point, thinned
from coordexp.evaluate.matching import THRESHOLDS, match_scene
from coordexp.evaluate.scene import build_scenes
from tests.unit.evaluate.scenes import BOX, EDGE, FAR, answer, crowd, record, said


def numbers(true, found):
    return evaluate([(1, record(*true))], [answer(*found)]).flat()


def test_one_found_one_missed_one_extra():
    got = numbers([("cat", BOX), ("cat", FAR)], [said("cat", BOX), said("cat", (0, 0, 50, 50))])
    assert got["precision_50"] == got["recall_50"] == got["f1_50"] == 0.5


def test_a_wrong_class_counts_only_without_class():
    got = numbers([("cat", BOX)], [said("dog", BOX)])
    assert got["f1_50"] == 0.0
    assert got["f1_50_any_class"] == 1.0
    assert got["mean_iou_any_class"] == 1.0
    assert "mean_iou" not in got


def test_classes_are_compared_letter_by_letter():
    assert numbers([("cat", BOX)], [said("Cat", BOX)])["f1_50"] == 0.0


def test_iou_decides_at_which_thresholds_a_box_counts():
    got = numbers([("cat", (0, 0, 100, 100))], [said("cat", (0, 0, 100, 72))])
    assert got["f1_50"] == 1.0
    assert got["f1_95"] == 0.0
    assert got["f1"] == pytest.approx(0.5)  # at 0.50, 0.55, 0.60, 0.65 and 0.70
    assert got["mean_iou"] == pytest.approx(0.72)


def test_an_iou_of_exactly_the_threshold_counts():
    assert numbers([("cat", (0, 0, 100, 100))], [said("cat", (0, 0, 100, 50))])["f1_50"] == 1.0


def test_as_many_pairs_as_possible_are_made_even_where_a_greedy_choice_makes_fewer():
    """The first prediction is one true box and just fits the other; the second just fits the first only."""
    true = [("cat", (0, 0, 100, 100)), ("cat", (32, 0, 132, 100))]
    found = [said("cat", (0, 0, 100, 100), 0.9), said("cat", (0, 0, 52, 100), 0.1)]
    assert numbers(true, found)["recall_50"] == 1.0


def test_of_equally_many_pairs_those_of_larger_iou_are_made():
    true, found = [("cat", (0, 0, 100, 100))], [said("cat", (0, 0, 60, 100)), said("cat", (0, 0, 90, 100))]
    got = numbers(true, found)
    assert got["mean_iou"] == pytest.approx(0.9)
    assert got["precision_50"] == 0.5


@pytest.mark.parametrize("seed", range(3))
def test_no_other_assignment_has_more_pairs(seed):
    for scene in build_scenes(*crowd(seed)):
        for pairs, threshold in zip(match_scene(scene).any_class, THRESHOLDS, strict=True):
            most = maximum_bipartite_matching(csr_array(scene.overlap >= threshold)) if scene.overlap.size else []
            assert len(pairs) == sum(column >= 0 for column in most)


def test_f1_does_not_depend_on_scores_or_order():
    truth, answers = crowd(4)
    own = evaluate(truth, answers).flat()
    turned = [type(one)(**(fields(one) | {"objects": one.objects[::-1]})) for one in answers]
    for other in (rescored(answers, ScoreMode.shuffled), rescored(answers, ScoreMode.constant), turned):
        got = evaluate(truth, other).flat()
        assert {k: v for k, v in got.items() if "f1_" in k and "best" not in k} == {
            k: v for k, v in own.items() if "f1_" in k and "best" not in k
        }


def fields(one):
    return {name: getattr(one, name) for name in one.__slots__}


def test_a_polygon_is_compared_by_its_mask_and_a_box_with_it_as_a_rectangle():
    diamond = (200, 0, 400, 200, 200, 400, 0, 200)
    got = numbers([("leaf", diamond)], [said("leaf", (0, 0, 400, 400))])
    assert got["mean_iou"] == pytest.approx(0.5, abs=0.01)
    assert numbers([("leaf", diamond)], [said("leaf", diamond)])["f1_95"] == 1.0


def test_a_polygon_too_thin_for_a_pixel_is_compared_by_its_box():
    sliver = (0, 0, 900, 1, 0, 1)
    truth = [(1, record(("line", sliver), width=100, height=100))]
    assert evaluate(truth, [answer(said("line", sliver))]).flat()["f1_95"] == 1.0


def test_each_class_has_its_own_row_and_unknown_ones_are_in_the_total_only():
    truth = [(1, record(("cat", BOX), ("dog", FAR)))]
    report = evaluate(truth, [answer(said("cat", BOX), said("cat", FAR), said("ghost", (0, 0, 9, 9)))])
    assert list(report.classes) == ["cat", "dog"]
    assert report.classes["cat"].at(0.5).precision == 0.5
    assert report.classes["dog"].at(0.5).recall == 0.0
    assert report.classes["dog"].at(0.5).precision is None
    assert report.with_class.at(0.5).precision == pytest.approx(1 / 3)


def test_the_rows_of_the_classes_add_up_to_the_total():
    truth, answers = crowd(7)
    report = evaluate(truth, answers)
    for k, tally in enumerate(report.with_class.tallies):
        rows = [scores.tallies[k] for scores in report.classes.values()]
        assert sum(row.pairs for row in rows) == tally.pairs
        assert sum(row.true for row in rows) == tally.true
    ghosts = report.behaviour.rates["unknown_class"].count
    assert sum(row.found for row in rows) + ghosts == tally.found


@pytest.mark.parametrize("ties", [False, True])
def test_the_last_point_of_the_curve_is_the_f1_of_the_report(ties):
    truth, answers = crowd(6, ties=ties)
    report = evaluate(truth, answers)
    assert report.curve[-1].tally == report.with_class.at(0.5)
    assert best_point(report.curve).tally.f1 >= report.flat()["f1_50"]


def test_every_point_of_the_curve_is_the_f1_of_the_objects_above_it():
    truth, answers = crowd(8, ties=True)
    curve = evaluate(truth, answers).curve
    assert [point.score for point in curve] == sorted({point.score for point in curve}, reverse=True)
    for point in curve:
        kept = [
            answer(*[o for o in one.objects if o.score >= point.score], image_id=one.image_id, image=one.image)
            for one in answers
        ]
        assert evaluate(truth, kept).with_class.at(0.5) == point.tally


def test_a_thinned_curve_keeps_its_ends():
    truth, answers = crowd(9, images=40)
    curve = evaluate(truth, answers).curve
    few = thinned(curve, most=10)
    assert len(few) == 10
    assert (few[0], few[-1]) == (curve[0], curve[-1])


def test_nothing_true_and_nothing_found_is_not_scored():
    report = evaluate([(1, record())], [answer()])
    assert "f1_50" not in report.flat()
    assert report.notes == ("no AP: the data has no true object",)


@pytest.mark.parametrize(
    ("truth", "answers", "words"),
    [
        ([(1, record())], [answer(), answer(image_id=7)], r"1 image_id \(7\) not in the data"),
        (
            [(k, record()) for k in range(1, 9)],
            [answer()],
            r"7 image_ids \(2, 3, 4, 5, 6, ...\) without an answer",
        ),
        ([(1, record())], [answer(), answer()], r"1 image_id \(1\) more than once in the answers"),
        ([(1, record()), (1, record())], [answer()], "more than once in the truth"),
        ([(1, record(image="b.png"))], [answer()], r"is 'a.png' in the answers and 'b.png' in the data"),
        ([(1, record(("cat", (5, 5, 5, 9))))], [answer()], r"true objects\[0\] bbox_2d .* has no area"),
        ([(1, record(("cat", (9, 9, 5, 5))))], [answer()], "has no area"),
    ],
)
def test_truth_and_answers_that_do_not_belong_together_are_refused(truth, answers, words):
    with pytest.raises(PredictionError, match=words):
        evaluate(truth, answers)


def test_an_image_report_says_what_was_missed_and_what_is_extra():
    (image,) = evaluate(
        [(1, record(("cat", BOX), ("cat", FAR)))], [answer(said("dog", BOX), said("cat", FAR))]
    ).images
    assert (image.pairs, image.missed, image.extra) == (((1, 1),), (0,), (0,))
    assert image.errors == 2


def test_a_crowd_of_a_thousand_boxes_is_scored():
    rows = [("cell", (x, y, x + 20, y + 20)) for x, y in itertools.product(range(0, 960, 30), repeat=2)]
    report = evaluate([(1, record(*rows))], [answer(*[said(d, b) for d, b in rows[::-1]])])
    assert report.with_class.at(0.95).pairs == len(rows) == 1024
    assert np.isclose(report.flat()["mean_iou"], 1.0)
    assert max(max(b) for _, b in rows) < EDGE
