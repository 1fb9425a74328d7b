"""Each rate of behaviour, with its numerator and denominator, on images that show one thing each."""

from dataclasses import replace

import pytest

from coordexp.evaluate import evaluate
from coordexp.evaluate.answer import NO_IMAGE
from coordexp.evaluate.behaviour import DEFINITIONS, Rate
from coordexp.evaluate.matching import MatchCounts
from coordexp.evaluate.report import count_by_image
from tests.unit.evaluate.scenes import BOX, EDGE, FAR, answer, crowd, invalid_object, prediction, record

NEARBY = (100, 100, 300, 302)  # IoU with BOX above 0.9
WHOLE = (0, 0, EDGE, EDGE)


def rates(true, predicted, **fields):
    return evaluate([(1, record(*true))], [answer(*predicted, **fields)]).behaviour.rates


def test_every_rate_has_a_definition_and_a_name_in_the_log():
    report = evaluate(*crowd(0, asks=True))
    assert set(report.behaviour.rates) == set(DEFINITIONS)
    assert set(DEFINITIONS) <= set(report.metrics())


def test_a_second_copy_is_a_duplicate():
    assert rates([("cat", BOX)], [prediction("cat", BOX), prediction("cat", NEARBY)])["duplicates"] == Rate(1, 2)


def test_a_copy_counts_once_whichever_of_the_two_is_matched():
    assert rates([("cat", BOX)], [prediction("cat", NEARBY), prediction("cat", BOX)])["duplicates"] == Rate(1, 2)


def test_copies_of_something_that_is_not_there_are_duplicates_but_the_first_is_not():
    assert rates([], [prediction("cat", BOX)] * 3)["duplicates"] == Rate(2, 3)


def test_two_true_objects_in_one_place_make_no_duplicate():
    assert (
        rates([("cat", BOX), ("cat", NEARBY)], [prediction("cat", BOX), prediction("cat", NEARBY)])[
            "duplicates"
        ].count
        == 0
    )


def test_another_class_or_another_place_is_no_duplicate():
    assert rates([("cat", BOX)], [prediction("cat", BOX), prediction("dog", BOX)])["duplicates"].count == 0
    assert rates([], [prediction("cat", BOX), prediction("cat", (100, 100, 300, 330))])["duplicates"].count == 0


def test_invalid_objects_are_counted_with_their_reasons():
    truth = [(1, record(("cat", BOX)))]
    report = evaluate(
        truth, [answer(prediction("cat", BOX), invalid_object(), invalid_object("syntax"), invalid_object())]
    )
    assert report.behaviour.rates["invalid"] == Rate(3, 4)
    assert list(report.behaviour.reasons.items()) == [("degenerate", 2), ("syntax", 1)]
    assert report.metrics()["precision_50"] == 1.0  # they are no detections


def test_an_answer_cut_off_is_truncated():
    assert rates([("cat", BOX)], [], finish="length")["truncated"] == Rate(1, 1)


@pytest.mark.parametrize(("count", "over"), [(1, 0), (2, 0), (3, 1)])
def test_an_answer_with_more_objects_than_true_ones_over_counts(count, over):
    predicted = [prediction("cat", BOX), prediction("cat", FAR), prediction("cat", (0, 0, 50, 50))][:count]
    assert rates([("cat", BOX), ("cat", FAR)], predicted)["over_count"] == Rate(over, 1)


ROWS = [(x, y, x + 80, y + 80) for y in (0, 300, 600) for x in (0, 300, 600)]  # nine boxes in reading order


@pytest.mark.parametrize("kept", [ROWS, ROWS[:5], ROWS[4:], ROWS[2:6], [ROWS[0], ROWS[8]], [ROWS[3]], []])
def test_a_missed_object_before_the_last_one_was_skipped_and_one_behind_it_stopped(kept):
    places = [ROWS.index(box) for box in kept]
    behind = len(ROWS) - 1 - max(places, default=-1)
    for written in (kept, kept[::-1]):  # a late place in the answer does not move an object down the image
        got = rates([("cat", box) for box in ROWS], [prediction("dog", box) for box in written])
        assert got["stopped"] == Rate(behind, len(ROWS))
        assert got["skipped"] == Rate(len(ROWS) - len(kept) - behind, len(ROWS))


def test_false_positives_say_how_far_the_model_has_looked_and_invalid_objects_do_not():
    true = [("cat", ROWS[2]), ("cat", ROWS[4])]
    got = rates(true, [prediction("cat", ROWS[3])])
    assert (got["skipped"], got["stopped"]) == (Rate(1, 2), Rate(1, 2))
    got = rates(true, [invalid_object()])
    assert (got["skipped"], got["stopped"]) == (Rate(0, 2), Rate(2, 2))


def test_a_missed_object_with_the_corner_of_the_last_one_was_skipped():
    got = rates([("cat", (100, 100, 300, 300))], [prediction("cat", (100, 100, 180, 180))])
    assert (got["skipped"], got["stopped"]) == (Rate(1, 1), Rate(0, 1))


@pytest.mark.parametrize("seed", range(20))
def test_every_missed_object_was_either_skipped_or_stopped_before(seed):
    truth, answers = crowd(seed, shapes=("bbox_2d", "poly"), asks=True)
    answers[seed % len(answers)] = replace(answers[seed % len(answers)], finish_reason=NO_IMAGE, objects=())
    report = evaluate(truth, answers)
    counts, skipped, stopped = report.any_class.at(0.5), *map(report.behaviour.rates.get, ("skipped", "stopped"))
    assert skipped.of == stopped.of == counts.true
    assert skipped.count + stopped.count == counts.true - counts.pairs
    by_image = count_by_image(truth, answers)
    missed = by_image["recall_50_any_class"] @ (-1, 1)
    assert (by_image["skipped"][:, 0] + by_image["stopped"][:, 0]).tolist() == missed.tolist()


def test_boxes_on_empty_images_are_counted_by_image():
    truth = [(1, record(image="1")), (2, record(image="2")), (3, record(("cat", BOX), image="3"))]
    answers = [
        answer(prediction("cat", BOX), prediction("cat", FAR), image="1"),
        answer(image_id=2, image="2"),
        answer(prediction("cat", BOX), image_id=3, image="3"),
    ]
    assert evaluate(truth, answers).behaviour.rates["boxes_on_empty"] == Rate(1, 2)


@pytest.mark.parametrize(("side", "count"), [(399, 0), (401, 1)])
def test_a_box_of_over_four_times_the_area_is_oversized(side, count):
    got = rates([("cat", (0, 0, 200, 200))], [prediction("cat", (0, 0, side, side))])
    assert got["oversized"] == Rate(count, 1)


def test_the_size_is_compared_with_the_true_object_that_overlaps_most_or_is_nearest():
    large, small = ("bus", (0, 0, 400, 400)), ("cup", (900, 900, 930, 930))
    assert rates([large, small], [prediction("bus", (0, 450, 400, 850))])["oversized"].count == 0
    assert rates([large, small], [prediction("cup", (700, 700, 990, 990))])["oversized"].count == 1


def test_a_box_over_nearly_the_whole_image_is_oversized_unless_a_true_one_is_as_large():
    assert rates([], [prediction("cat", WHOLE)])["oversized"].count == 1
    assert rates([("cat", (0, 0, 800, 800))], [prediction("dog", WHOLE), prediction("dog", (0, 0, 800, 800))])[
        "oversized"
    ] == Rate(1, 2)
    assert rates([("sky", WHOLE)], [prediction("cat", WHOLE), prediction("sky", WHOLE)])["oversized"].count == 0


def test_a_desc_that_no_true_object_of_the_data_has_is_unknown():
    truth = [(1, record(("cat", BOX), image="1")), (2, record(("dog", BOX), image="2"))]
    answers = [answer(prediction("dog", BOX), prediction("ghost", FAR), image="1"), answer(image_id=2, image="2")]
    behaviour = evaluate(truth, answers).behaviour
    assert behaviour.rates["unknown_class"] == Rate(1, 2)
    assert behaviour.unknown == {"ghost": 1}


@pytest.mark.parametrize(("text", "count"), [("{}", 0), (' \n{"a"', 0), ("", 1), ("I see a cat", 1)])
def test_an_answer_without_a_container_is_unreadable(text, count):
    assert rates([], [], text=text)["unreadable"] == Rate(count, 1)


def test_answers_to_a_list_of_classes():
    """Cats are asked for and there, dogs are asked for and absent, cups are there and not asked for."""
    asked = record(("cat", BOX), ("cup", FAR), classes=("cat", "dog", "cow"))
    report = evaluate(
        [(1, asked)], [answer(prediction("cat", BOX), prediction("dog", FAR), prediction("cup", FAR))]
    )
    assert report.behaviour.rates["absent_classes"] == Rate(1, 2)
    assert report.behaviour.rates["unasked"] == Rate(1, 3)
    assert report.behaviour.rates["over_count"] == Rate(1, 1)
    assert report.asked[3] == report.with_class.at(0.5) == MatchCounts(1, 3, 1)
    assert report.metrics()["f1_50_asked_3"] == 0.5


def test_the_right_answer_to_absent_classes_is_empty():
    truth = [(1, record(("cat", BOX), classes=("dog",))), (2, record(("cat", BOX), image="b.png"))]
    report = evaluate(truth, [answer(), answer(image_id=2, image="b.png")])
    assert report.behaviour.rates["absent_classes"] == Rate(0, 1)
    assert report.behaviour.rates["boxes_on_empty"] == Rate(0, 1)
    assert report.behaviour.rates["unasked"] == Rate(0, 0)
    assert list(report.asked) == [1]
    assert report.with_class.at(0.5) == MatchCounts(0, 0, 1)
