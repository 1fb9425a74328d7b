"""Pictures of detections: outlines are where the objects are, and the image is left alone elsewhere."""

import numpy as np
from PIL import Image

from coordexp import DetectedObject, Detections
from coordexp.detect.drawing import draw_detections


def draw(image, *objects):
    detections = Detections(tuple(objects), "", "stop", *image.size)
    return np.asarray(draw_detections(image, detections)).astype(int)


def test_a_box_is_outlined_and_its_inside_is_left_alone():
    ground = Image.new("RGB", (600, 400), (200, 200, 200))
    picture = draw(ground, DetectedObject("cup", (100, 200, 300, 300), 0.5))
    changed = np.abs(picture - 200).sum(2) > 0
    for x, y in ((100, 250), (300, 250), (200, 200), (200, 300)):
        assert changed[y, x]
    assert not changed[205:295, 105:295].any() and not changed[310:].any() and not changed[:, 310:].any()
    assert changed[180:198, 100:140].any(), "the name is above the box"


def test_a_small_image_is_enlarged_with_its_shapes():
    ground = Image.new("RGB", (64, 32), (200, 200, 200))
    picture = draw(ground, DetectedObject("kite", (16, 8, 48, 24), 0.5, ((16, 8), (48, 8), (16, 24))))
    assert picture.shape == (256, 512, 3)
    changed = np.abs(picture - 200).sum(2) > 0
    assert changed[64:192:16, 128].all() and changed[128, 256], "two sides of the triangle"
    assert not changed[185, 380], "the corner that only its box has"


def test_names_stay_inside_the_picture_and_objects_of_one_name_have_one_colour():
    ground = Image.new("RGB", (600, 600), (0, 0, 0))
    long = "a very long name " * 20
    picture = draw(
        ground,
        DetectedObject(long, (590, 0, 600, 10), 1.0),
        DetectedObject("cup", (100, 100, 200, 200), 1.0),
        DetectedObject("cup", (300, 300, 400, 400), 1.0),
    )
    assert picture[5:15, 10:580].any()
    assert picture[150, 100].tolist() == picture[350, 300].tolist() != [0, 0, 0]
