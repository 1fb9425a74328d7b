"""Detections in pixels, and their conversion for other tools."""

import json

import pytest
from pycocotools import mask as rle

from coordexp import DetectedObject, Detections
from coordexp.detect.answering import find_untrained_request, make_record
from coordexp.evaluate import write_predictions
from coordexp.evaluate.predictions import number_answered_classes, write_images
from tests.unit.evaluate.scenes import BOX, answer, invalid_object, prediction, record

TRIANGLE = (0, 0, 999, 0, 0, 999)


def detections(*objects, width=200, height=100):
    return Detections.of(answer(*objects, finish="length"), record(width=width, height=height))


def test_boxes_and_polygons_are_in_pixels_of_the_image():
    result = detections(prediction("cup", (0, 0, 999, 333), 0.7), prediction("kite", TRIANGLE), invalid_object())
    cup, kite = result
    assert cup.box == pytest.approx((0, 0, 200, 100 / 3)) and (cup.name, cup.score) == ("cup", 0.7)
    assert cup.polygon is None
    assert kite.polygon == ((0.0, 0.0), (200.0, 0.0), (0.0, 100.0)) and kite.box == (0, 0, 200, 100)
    assert (len(result), result.refused, result.is_truncated) == (2, ("degenerate",), True)


def test_coco_results_are_those_that_predict_writes(tmp_path):
    objects = (prediction("cup", BOX, 0.7), prediction("kite", TRIANGLE, 0.2), prediction("ghost", BOX, 0.1))
    truth = [(7, record(("cup", BOX), ("kite", TRIANGLE), width=200, height=100))]
    write_predictions(tmp_path / "preds.json", [answer(*objects, image_id=7)], truth)
    results = detections(*objects).to_coco(7, {"cup": 1, "kite": 2})
    assert json.loads(json.dumps(results)) == json.loads((tmp_path / "preds.json").read_text())
    assert [entry["category_id"] for entry in results] == [1, 2, 0]
    assert detections(*objects).to_coco(7, {"cup": 0})[1]["category_id"] == 1  # 0 is a class here


def test_classes_of_images_without_labels_are_numbered_and_named_in_a_coco_file(tmp_path):
    from pycocotools.coco import COCO

    answers = [answer(prediction("fork", BOX, 0.9), prediction("cup", BOX, 0.8), prediction("ape", BOX, 0.7))]
    categories = number_answered_classes(["cup", "spoon"], answers)
    assert categories == {"cup": 1, "spoon": 2, "ape": 3, "fork": 4}
    images = [(1, record(width=200, height=100))]
    write_predictions(tmp_path / "preds.json", answers, images, categories)
    write_images(tmp_path / "preds.json", images, categories)
    coco = COCO(str(tmp_path / "preds.images.json"))
    results = coco.loadRes(str(tmp_path / "preds.json"))
    names = [coco.cats[entry["category_id"]]["name"] for entry in results.anns.values()]
    assert names == ["fork", "cup", "ape"] and coco.imgs[1]["file_name"] == "a.png"


@pytest.mark.parametrize(
    ("box", "area"), [((10, 10, 20, 20), 100), ((5, 5, 6, 6), 1), ((0, 0, 100, 50), 5000), ((90, 40, 99, 50), 90)]
)
def test_the_mask_of_a_box_has_its_area_and_that_of_a_polygon_the_pixels_of_pycocotools(box, area):
    ring = (3, 4, 60, 7, 40, 45, 12, 30)
    kite = DetectedObject("kite", (3, 4, 60, 45), 0.5, tuple(zip(ring[::2], ring[1::2], strict=True)))
    image = Detections((DetectedObject("cup", box, 0.5), kite), "", "stop", 100, 50)
    of_box, of_polygon = [image._draw_mask(item) for item in image]
    assert of_box.sum() == area and of_box[box[1] : box[3], box[0] : box[2]].all()
    (expected,) = rle.frPyObjects([list(ring)], 50, 100)
    assert (of_polygon == rle.decode(expected)).all() and of_polygon.dtype == bool


def test_detections_become_those_of_supervision():
    supervision = pytest.importorskip("supervision")
    result = detections(prediction("cup", (0, 0, 499, 999), 0.7), prediction("kite", TRIANGLE, 0.5))
    converted = result.to_supervision(["kite"])
    assert isinstance(converted, supervision.Detections)
    assert converted.class_id.tolist() == [-1, 0]
    assert list(converted["class_name"]) == ["cup", "kite"]
    assert converted.mask.shape == (2, 100, 200)
    assert converted.mask.sum((1, 2)) == pytest.approx([100 * 100, 100 * 100], rel=0.03)
    assert detections(prediction("cup", BOX)).to_supervision().class_id.tolist() == [0]
    assert len(detections().to_supervision()) == 0


def test_a_request_of_a_kind_without_a_recorded_prompt_gives_a_warning(tmp_path):
    asks = make_record("a.png", (64, 48), ["cup"])
    assert find_untrained_request(tmp_path, asks) is None  # not a checkpoint of a training run
    (tmp_path / "coordexp.json").write_text('{"prompt": "Detect all objects."}')
    assert "was not trained to be asked for a list of classes" in (find_untrained_request(tmp_path, asks) or "")
    assert find_untrained_request(tmp_path, make_record("a.png", (64, 48))) is None
    assert find_untrained_request(tmp_path, make_record("a.png", (64, 48), ["cup"], None, "{classes}?")) is None
    note = {"prompt": "All.", "class_prompt": "{classes}?", "expression_prompt": "{expression}?"}
    (tmp_path / "coordexp.json").write_text(json.dumps(note | {"requests": ["expression"]}))
    assert "was not trained to be asked for a list of classes" in (find_untrained_request(tmp_path, asks) or "")
    assert find_untrained_request(tmp_path, make_record("a.png", (64, 48), expression="the cup")) is None
