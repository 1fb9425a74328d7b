"""AP and AR are COCO's: pycocotools, on the files that we write, gives the same twelve numbers."""

import json

import numpy as np
import pytest
from pycocotools.coco import COCO

from coordexp.evaluate import evaluate, write_predictions
from coordexp.evaluate.comparison import compare_images
from coordexp.evaluate.report import NAMES, coco_truth
from tests.unit.evaluate.scenes import BOX, FAR, answer, crowd, masks_alone, prediction, record, run_pycocotools


def evaluate_file(truth, answers, kind, folder):
    """Return the evaluation that pycocotools makes from preds.json, or from its masks alone."""
    write_predictions(folder / "preds.json", answers, truth)
    results = json.loads((folder / "preds.json").read_text())
    dataset = COCO()
    dataset.dataset = coco_truth(compare_images(truth, answers))
    dataset.createIndex()
    return run_pycocotools(dataset, results if kind == "bbox" else masks_alone(results, truth), kind)


def twelve_numbers(scores):
    return [-1.0 if scores.values[name] is None else scores.values[name] for name in NAMES.values()]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_all_twelve_box_numbers_are_those_of_pycocotools(seed, ties, tmp_path):
    truth, answers = crowd(seed, ties=ties)
    expected = evaluate_file(truth, answers, "bbox", tmp_path).stats
    np.testing.assert_allclose(twelve_numbers(evaluate(truth, answers).boxes), expected, atol=1e-6, rtol=0)
    assert 0.05 < expected[0] < 0.95


@pytest.mark.parametrize("seed", range(4))
def test_all_twelve_mask_numbers_are_those_of_pycocotools(seed, tmp_path):
    truth, answers = crowd(seed, shapes=("bbox_2d", "poly"))
    expected = evaluate_file(truth, answers, "segm", tmp_path).stats
    report = evaluate(truth, answers)
    np.testing.assert_allclose(twelve_numbers(report.masks), expected, atol=1e-6, rtol=0)
    assert report.metrics()["mask_ap"] != report.metrics()["ap"]


def test_the_ap_of_each_class_is_that_of_pycocotools(tmp_path):
    truth, answers = crowd(1)
    precision = evaluate_file(truth, answers, "bbox", tmp_path).eval["precision"]
    classes = evaluate(truth, answers).boxes.classes
    assert list(classes) == ["cat", "cup", "dog"]
    for k, value in enumerate(classes.values()):
        assert value == pytest.approx(precision[:, :, k, 0, 2].mean(), abs=1e-6)


def test_more_than_a_hundred_detections_are_cut_as_coco_cuts_them(tmp_path):
    many = answer(*[prediction("cat", (k, 0, k + 50, 90), 0.9 - k / 1000) for k in range(150)])
    truth = [(1, record(("cat", (140, 0, 190, 90))))]
    expected = evaluate_file(truth, [many], "bbox", tmp_path).stats
    np.testing.assert_allclose(twelve_numbers(evaluate(truth, [many]).boxes), expected, atol=1e-6, rtol=0)


def test_the_size_of_a_polygon_is_that_of_its_mask():
    """A diamond of 800 pixels, which is small, in a box of 1,600, which is not."""
    diamond = (120, 100, 140, 120, 120, 140, 100, 120)
    masks = evaluate([(1, record(("leaf", diamond)))], [answer(prediction("leaf", diamond))]).masks
    assert masks.values["ap_small"] == pytest.approx(1.0)
    assert masks.values["ap_medium"] is None


def test_boxes_alone_have_no_mask_numbers():
    report = evaluate([(1, record(("cat", BOX)))], [answer(prediction("cat", BOX))])
    assert report.masks is None
    assert report.metrics()["ap"] == pytest.approx(1.0)
    assert not any(name.startswith("mask_") for name in report.metrics())


def test_without_a_score_there_is_no_ap_but_everything_else():
    report = evaluate([(1, record(("cat", BOX)))], [answer(prediction("cat", BOX, None), prediction("cat", FAR))])
    assert "ap" not in report.metrics()
    assert report.metrics()["f1_50"] == pytest.approx(2 / 3)
    assert report.notes == ("no AP: 1 of 2 objects have no score",)


def test_equal_scores_give_a_note_that_ap_depends_on_the_order_of_the_answers():
    objects = (prediction("cat", BOX, 0.5), prediction("cat", FAR, 0.5))
    (note,) = evaluate([(1, record(("cat", BOX)))], [answer(*objects)]).notes
    assert note.startswith("all scores are equal")
