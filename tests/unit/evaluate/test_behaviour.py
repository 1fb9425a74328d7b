"""Each rate of behaviour, with its numerator and denominator, on images that show one thing each."""

from dataclasses import replace

import pytest

from coordexp.evaluate import evaluate
from coordexp.evaluate.answer import NO_IMAGE
from coordexp.evaluate.behaviour import DEFINITIONS, Rate
from coordexp.evaluate.matching import MatchCounts
from coordexp.evaluate.report import count_by_image
from tests.unit.evaluate.scenes import BOX, FAR, answer, crowd, invalid_object, prediction, record


def rates(true, predicted, **fields):
    return evaluate([(1, record(*true))], [answer(*predicted, **fields)]).behaviour.rates


def test_every_rate_has_a_definition_and_a_name_in_the_log():
    report = evaluate(*crowd(0, asks=True))
    assert set(report.behaviour.rates) == set(DEFINITIONS)
    assert set(DEFINITIONS) <= set(report.metrics())


NEARBY = (100, 100, 300, 302)  # IoU with BOX above 0.9
CAT, COPY, ELSEWHERE = ("cat", BOX), ("cat", NEARBY), ("cat", FAR)
SMALL = ("cup", (900, 900, 930, 930))


@pytest.mark.parametrize(
    ("name", "true", "predicted", "expected"),
    [
        ("duplicates", [CAT], [CAT, COPY], Rate(1, 2)),
        ("duplicates", [CAT], [COPY, CAT], Rate(1, 2)),  # whichever of the two is matched
        ("duplicates", [], [CAT] * 3, Rate(2, 3)),  # the first copy of something that is not there is none
        ("duplicates", [CAT, COPY], [CAT, COPY], Rate(0, 2)),  # two true objects in one place
        ("duplicates", [CAT], [CAT, ("dog", BOX)], Rate(0, 2)),
        ("duplicates", [], [CAT, ("cat", (100, 100, 300, 330))], Rate(0, 2)),
        ("over_count", [CAT, ELSEWHERE], [CAT, ELSEWHERE], Rate(0, 1)),
        ("over_count", [CAT, ELSEWHERE], [CAT, ELSEWHERE, SMALL], Rate(1, 1)),
        # A missed object with the corner of the last one was skipped.
        ("skipped", [("cat", (100, 100, 300, 300))], [("cat", (100, 100, 180, 180))], Rate(1, 1)),
    ],
)
def test_what_each_rate_counts(name, true, predicted, expected):
    assert rates(true, [prediction(*item) for item in predicted])[name] == expected


@pytest.mark.parametrize(("text", "count"), [("{}", 0), (' \n{"a"', 0), ("", 1), ("I see a cat", 1)])
def test_how_an_answer_ends_and_begins(text, count):
    got = rates([CAT], [], finish="length", text=text)
    assert (got["truncated"], got["unreadable"]) == (Rate(1, 1), Rate(count, 1))


def test_invalid_objects_are_counted_with_their_reasons():
    truth = [(1, record(("cat", BOX)))]
    report = evaluate(
        truth, [answer(prediction("cat", BOX), invalid_object(), invalid_object("syntax"), invalid_object())]
    )
    assert report.behaviour.rates["invalid"] == Rate(3, 4)
    assert list(report.behaviour.reasons.items()) == [("degenerate", 2), ("syntax", 1)]
    assert report.metrics()["precision_50"] == 1.0  # they are no detections


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


def test_a_desc_that_no_true_object_of_the_data_has_is_unknown():
    truth = [(1, record(("cat", BOX), image="1")), (2, record(("dog", BOX), image="2"))]
    answers = [answer(prediction("dog", BOX), prediction("ghost", FAR), image="1"), answer(image_id=2, image="2")]
    behaviour = evaluate(truth, answers).behaviour
    assert behaviour.rates["unknown_class"] == Rate(1, 2)
    assert behaviour.unknown == {"ghost": 1}


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


def test_ratios_of_sums_are_the_metrics_of_the_report():
    truth, answers = crowd(3, images=30, shapes=("bbox_2d", "poly"), asks=True)
    answers[4] = answer(
        invalid_object(), prediction("cat", (1, 1, 50, 50)), image_id=5, image="5.png", finish="length", text="no"
    )
    metrics = evaluate(truth, answers).metrics()
    for name, counts in count_by_image(truth, answers).items():
        numerator, denominator = counts.sum(axis=0)
        assert numerator / denominator == pytest.approx(metrics[name], abs=1e-12), name
