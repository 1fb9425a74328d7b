"""Each rate of behaviour, with its numerator and denominator, on scenes that show one thing."""

import pytest

from coordexp.evaluate import evaluate
from coordexp.evaluate.behaviour import DEFINITIONS, Rate
from tests.unit.evaluate.scenes import BOX, EDGE, FAR, answer, crowd, record, refused, said

NEARBY = (100, 100, 300, 302)  # IoU with BOX above 0.9
WHOLE = (0, 0, EDGE, EDGE)


def rates(true, found, **how):
    return evaluate([(1, record(*true))], [answer(*found, **how)]).behaviour.rates


def test_every_rate_has_a_definition_and_a_name_in_the_log():
    report = evaluate(*crowd(0))
    assert set(report.behaviour.rates) == set(DEFINITIONS)
    assert set(DEFINITIONS) <= set(report.flat())


def test_a_second_copy_is_a_duplicate():
    assert rates([("cat", BOX)], [said("cat", BOX), said("cat", NEARBY)])["duplicates"] == Rate(1, 2)


def test_a_copy_counts_once_whichever_of_the_two_is_matched():
    assert rates([("cat", BOX)], [said("cat", NEARBY), said("cat", BOX)])["duplicates"] == Rate(1, 2)


def test_copies_of_something_that_is_not_there_are_duplicates_but_the_first_is_not():
    assert rates([], [said("cat", BOX)] * 3)["duplicates"] == Rate(2, 3)


def test_two_true_objects_in_one_place_make_no_duplicate():
    assert rates([("cat", BOX), ("cat", NEARBY)], [said("cat", BOX), said("cat", NEARBY)])["duplicates"].count == 0


def test_another_class_or_another_place_is_no_duplicate():
    assert rates([("cat", BOX)], [said("cat", BOX), said("dog", BOX)])["duplicates"].count == 0
    assert rates([], [said("cat", BOX), said("cat", (100, 100, 300, 330))])["duplicates"].count == 0


def test_invalid_objects_are_counted_with_their_reasons():
    truth = [(1, record(("cat", BOX)))]
    report = evaluate(truth, [answer(said("cat", BOX), refused(), refused("syntax"), refused())])
    assert report.behaviour.rates["invalid"] == Rate(3, 4)
    assert list(report.behaviour.reasons.items()) == [("degenerate", 2), ("syntax", 1)]
    assert report.flat()["precision_50"] == 1.0  # they are no detections


def test_an_answer_cut_off_is_truncated_and_no_early_stop():
    got = rates([("cat", BOX)], [], finish="length")
    assert got["truncated"] == Rate(1, 1)
    assert got["early_stop"] == Rate(0, 0)
    assert got["early_stop"].value is None


@pytest.mark.parametrize(("count", "early", "over"), [(1, 1, 0), (2, 0, 0), (3, 0, 1)])
def test_an_answer_stops_early_or_goes_on_too_long_by_its_number_of_objects(count, early, over):
    found = [said("cat", BOX), said("cat", FAR), said("cat", (0, 0, 50, 50))][:count]
    got = rates([("cat", BOX), ("cat", FAR)], found)
    assert got["early_stop"] == Rate(early, 1)
    assert got["over_count"] == Rate(over, 1)


def test_invalid_objects_do_not_keep_an_answer_from_having_stopped_early():
    assert rates([("cat", BOX)], [refused()])["early_stop"] == Rate(1, 1)


def test_boxes_on_empty_images_are_counted_by_image():
    truth = [(1, record(image="1")), (2, record(image="2")), (3, record(("cat", BOX), image="3"))]
    answers = [
        answer(said("cat", BOX), said("cat", FAR), image="1"),
        answer(image_id=2, image="2"),
        answer(said("cat", BOX), image_id=3, image="3"),
    ]
    assert evaluate(truth, answers).behaviour.rates["boxes_on_empty"] == Rate(1, 2)


@pytest.mark.parametrize(("side", "count"), [(399, 0), (401, 1)])
def test_a_box_of_over_four_times_the_area_is_oversized(side, count):
    got = rates([("cat", (0, 0, 200, 200))], [said("cat", (0, 0, side, side))])
    assert got["oversized"] == Rate(count, 1)


def test_the_size_is_compared_with_the_true_object_that_overlaps_most_or_is_nearest():
    large, small = ("bus", (0, 0, 400, 400)), ("cup", (900, 900, 930, 930))
    assert rates([large, small], [said("bus", (0, 450, 400, 850))])["oversized"].count == 0
    assert rates([large, small], [said("cup", (700, 700, 990, 990))])["oversized"].count == 1


def test_a_box_over_nearly_the_whole_image_is_oversized_unless_a_true_one_is_as_large():
    assert rates([], [said("cat", WHOLE)])["oversized"].count == 1
    assert rates([("cat", (0, 0, 800, 800))], [said("dog", WHOLE), said("dog", (0, 0, 800, 800))])[
        "oversized"
    ] == Rate(1, 2)
    assert rates([("sky", WHOLE)], [said("cat", WHOLE), said("sky", WHOLE)])["oversized"].count == 0


def test_a_desc_that_no_true_object_of_the_data_has_is_unknown():
    truth = [(1, record(("cat", BOX), image="1")), (2, record(("dog", BOX), image="2"))]
    answers = [answer(said("dog", BOX), said("ghost", FAR), image="1"), answer(image_id=2, image="2")]
    behaviour = evaluate(truth, answers).behaviour
    assert behaviour.rates["unknown_class"] == Rate(1, 2)
    assert behaviour.unknown == {"ghost": 1}


@pytest.mark.parametrize(("text", "count"), [("{}", 0), (' \n{"a"', 0), ("", 1), ("I see a cat", 1)])
def test_an_answer_without_a_container_is_unreadable(text, count):
    assert rates([], [], text=text)["unreadable"] == Rate(count, 1)
