"""Each rate of behaviour, with its numerator and denominator, on images that show one thing each."""

import pytest

from coordexp.evaluate import evaluate
from coordexp.evaluate.behaviour import DEFINITIONS, Rate
from coordexp.evaluate.matching import MatchCounts
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


def test_an_answer_cut_off_is_truncated_and_no_early_stop():
    got = rates([("cat", BOX)], [], finish="length")
    assert got["truncated"] == Rate(1, 1)
    assert got["early_stop"] == Rate(0, 0)
    assert got["early_stop"].value is None


@pytest.mark.parametrize(("count", "early", "over"), [(1, 1, 0), (2, 0, 0), (3, 0, 1)])
def test_an_answer_stops_early_or_goes_on_too_long_by_its_number_of_objects(count, early, over):
    predicted = [prediction("cat", BOX), prediction("cat", FAR), prediction("cat", (0, 0, 50, 50))][:count]
    got = rates([("cat", BOX), ("cat", FAR)], predicted)
    assert got["early_stop"] == Rate(early, 1)
    assert got["over_count"] == Rate(over, 1)


def test_invalid_objects_do_not_keep_an_answer_from_having_stopped_early():
    assert rates([("cat", BOX)], [invalid_object()])["early_stop"] == Rate(1, 1)


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
