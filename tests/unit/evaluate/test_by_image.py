"""Counts by image add up to what an evaluation reports."""

import pytest

from coordexp.evaluate import count_by_image, evaluate
from coordexp.evaluate.report import rate_names
from tests.unit.evaluate.scenes import answer, crowd, invalid_object, prediction, record


def test_ratios_of_sums_are_the_metrics_of_the_report():
    truth, answers = crowd(3, images=30, shapes=("bbox_2d", "poly"), asks=True)
    answers[4] = answer(
        invalid_object(), prediction("cat", (1, 1, 50, 50)), image_id=5, image="5.png", finish="length", text="no"
    )
    metrics = evaluate(truth, answers).metrics()
    for name, counts in count_by_image(truth, answers).items():
        numerator, denominator = counts.sum(axis=0)
        assert numerator / denominator == pytest.approx(metrics[name], abs=1e-12), name


def test_every_rate_has_two_counts_per_image_in_the_order_of_the_truth():
    truth = [(2, record(("cup", (1, 1, 90, 90)), image="b.png")), (7, record())]
    answers = [
        answer(*[prediction("cup", (1, 1, 90, 90))] * 2, image_id=7),
        answer(prediction("cup", (1, 1, 90, 90)), image_id=2, image="b.png"),
    ]
    counts = count_by_image(truth, answers)
    assert tuple(counts) == rate_names()
    assert counts["recall_50"].tolist() == [[1, 1], [0, 0]]
    assert counts["f1_50"].tolist() == [[2, 2], [0, 2]]
    assert counts["boxes_on_empty"].tolist() == [[0, 0], [1, 1]]
