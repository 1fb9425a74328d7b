"""Counts by image add up to what an evaluation reports."""

import pytest

from coordexp.evaluate import evaluate
from coordexp.evaluate.by_image import count_by_image, names
from tests.unit.evaluate.scenes import answer, crowd, record, refused, said


def test_ratios_of_sums_are_the_numbers_of_the_report():
    truth, answers = crowd(3, images=30, shapes=("bbox_2d", "poly"))
    answers[4] = answer(
        refused(), said("cat", (1, 1, 50, 50)), image_id=5, image="5.png", finish="length", text="no"
    )
    flat = evaluate(truth, answers).flat()
    for name, counts in count_by_image(truth, answers).items():
        above, below = counts.sum(axis=0)
        assert above / below == pytest.approx(flat[name], abs=1e-12), name


def test_every_rate_has_two_counts_an_image_in_the_order_of_the_truth():
    truth = [(2, record(("cup", (1, 1, 90, 90)), image="b.png")), (7, record())]
    answers = [answer(image_id=7), answer(said("cup", (1, 1, 90, 90)), image_id=2, image="b.png")]
    found = count_by_image(truth, answers)
    assert tuple(found) == names()
    assert found["recall_50"].tolist() == [[1, 1], [0, 0]]
    assert found["f1_50"].tolist() == [[2, 2], [0, 0]]
    assert found["boxes_on_empty"].tolist() == [[0, 0], [0, 1]]
