"""A duplicate overlaps an earlier shape that is kept. Shapes that overlap only a duplicate are kept."""

import random

import numpy as np
import pytest

from coordexp.answers.match import box_iou, find_duplicates, mask_iou, rasterise
from coordexp.data import Geometry
from tests.rollouts import random_shape
from tests.unit.answers.conftest import box, poly

SQUARE = box(100, 100, 300, 300)


def test_an_overlap_of_exactly_the_limit_is_enough():
    half = [box(0, 0, 200, 100), box(0, 0, 100, 100)]
    assert find_duplicates(half, 0.5) == (1,)
    assert find_duplicates(half, 0.501) == ()


def test_a_shape_too_thin_for_the_canvas_is_compared_by_its_box():
    thin = poly(500, 100, 501, 100, 501, 900)
    assert find_duplicates([thin, thin, poly(100, 100, 300, 100, 300, 300)], 0.9) == (1,)


@pytest.mark.parametrize("iou", [0.0, -0.1, 1.01, float("nan")])
def test_a_limit_that_is_no_share_is_refused(iou):
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        find_duplicates([SQUARE], iou)


def test_a_certain_shape_is_never_a_duplicate_and_the_others_that_overlap_it_are():
    copies = [SQUARE] * 3
    assert find_duplicates(copies, 0.5, certain=[1]) == (0, 2)
    assert find_duplicates(copies, 0.5, certain=[0, 2]) == (1,)
    assert find_duplicates(copies, 0.5, certain=[0, 1, 2]) == ()


def test_with_names_only_shapes_of_one_name_are_duplicates_of_each_other():
    copies, names = [SQUARE] * 4, ["person", "motorbike", "person", "motorbike"]
    assert find_duplicates(copies, 0.5, names=names) == (2, 3)
    assert find_duplicates(copies, 0.5, certain=[3], names=names) == (1, 2)


def find_one_by_one(shapes, iou):
    """Return the duplicates by the definition, pair by pair."""
    duplicates = []
    for i, shape in enumerate(shapes):
        kept = [other for j, other in enumerate(shapes[:i]) if j not in duplicates]
        if any(overlap(shape, other) >= iou for other in kept):
            duplicates.append(i)
    return tuple(duplicates)


def overlap(left, right):
    if left.kind == right.kind == "bbox_2d":
        rows = [np.array([shape.bins], dtype=np.float64) for shape in (left, right)]
        return box_iou(*rows)[0, 0]
    return mask_iou(rasterise([left], 256), rasterise([right], 256))[0, 0]


@pytest.mark.parametrize("kinds", [{"bbox_2d"}, {"poly"}, {"bbox_2d", "poly"}])
def test_random_shapes_have_the_duplicates_of_the_definition(kinds):
    chooser = random.Random(1)
    drawn = [shape for shape in (random_shape(chooser) for _ in range(400)) if shape.kind in kinds]
    count = 0
    for _ in range(60):
        originals = chooser.sample(drawn, 4)
        shapes = [move(chooser, chooser.choice(originals)) for _ in range(12)]
        for iou in (0.3, 0.7):
            duplicates = find_duplicates(shapes, iou)
            assert duplicates == find_one_by_one(shapes, iou)
            count += len(duplicates)
    assert 100 < count < 1000


def move(chooser, shape):
    """Return the shape a little further left or up, as far as it does not leave the image."""
    x, y = (chooser.randint(0, min(60, *shape.bins[axis::2])) for axis in (0, 1))
    return Geometry(shape.kind, tuple(bin - (y if k % 2 else x) for k, bin in enumerate(shape.bins)))
