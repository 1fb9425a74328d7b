"""The targets of polygon vertices, from optimal transport."""

import math
import random

import numpy as np
import pytest

from coordexp.answers.transport import coord_targets, project
from coordexp.config.rollout import OptimalTransport
from coordexp.data import Geometry

DEFAULT = OptimalTransport()


def ring(count, size, x=500.0, y=500.0, noise=0.0, seed=0):
    chooser = random.Random(seed)
    angles = [2 * math.pi * k / count for k in range(count)]
    return [
        (
            x + size / 2 * math.cos(a) + chooser.gauss(0, noise),
            y + size / 2 * math.sin(a) + chooser.gauss(0, noise),
        )
        for a in angles
    ]


@pytest.mark.parametrize("size", [5, 10, 20, 80])
@pytest.mark.parametrize("count", [3, 4, 6, 12])
@pytest.mark.parametrize("cost", ["l1", "l2"])
def test_a_shape_matched_to_itself_keeps_its_vertices(size, count, cost):
    points = ring(count, size)
    (landed,) = project([(points, points)], OptimalTransport(cost=cost))
    assert np.abs(landed - np.array(points)).max() < 1


@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize("size", [5, 80])
def test_shapes_far_apart_do_not_collapse(size, cost):
    here, there = ring(6, size, 50, 50), ring(6, size, 950, 950)
    (landed,) = project([(here, there)], OptimalTransport(cost=cost))
    assert np.abs(landed - np.array(there)).max() < 1


def test_many_pairs_at_once_have_the_same_targets_as_one_at_a_time():
    problems = [(ring(3 + k % 7, 50 + k, noise=2, seed=k), ring(3 + k % 5, 60, 510, seed=k)) for k in range(25)]
    together = project(problems, DEFAULT)
    for problem, landed in zip(problems, together, strict=True):
        assert np.allclose(project([problem], DEFAULT)[0], landed, atol=1e-9)
    assert project([], DEFAULT) == []


@pytest.mark.scenario("R28.C1", "R28.C5", on="pure")
def test_a_pair_of_boxes_takes_the_true_box_and_a_pair_with_a_polygon_is_transported():
    true_box = Geometry("bbox_2d", (100, 100, 200, 200))
    diamond = Geometry("poly", (150, 100, 200, 150, 150, 200, 100, 150))
    exact, box_to_polygon, polygon_to_box = coord_targets(
        [(Geometry("bbox_2d", (90, 95, 190, 205)), true_box), (true_box, diamond), (diamond, true_box)], DEFAULT
    )
    assert exact == (100.0, 100.0, 200.0, 200.0)
    assert len(box_to_polygon) == 4
    assert box_to_polygon[0] < 150 < box_to_polygon[2]
    assert box_to_polygon[1] < 150 < box_to_polygon[3]
    assert len(polygon_to_box) == 8
    assert any(value != round(value) for value in (*box_to_polygon, *polygon_to_box))
