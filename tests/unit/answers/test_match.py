"""Matching finds the cheapest gated assignment, whatever the order of the true objects, and its masks are
exact."""

import itertools
import random

import numpy as np
import pytest
import shapely

from coordexp.answers import match as assignment
from coordexp.answers.match import assign, choose_candidates, mask_iou, match_objects, rasterise
from coordexp.config import RolloutMatching
from coordexp.data import Geometry
from tests.examples import SHARE
from tests.rollouts import random_shape
from tests.unit.answers.conftest import box, poly


def least_cost(cost, feasible, fp, fn):
    """Return the lowest cost of all ways to give each row a column of its own or none."""
    n, m = cost.shape
    best = float("inf")
    for choice in itertools.product(range(-1, m), repeat=n):
        taken = [j for j in choice if j >= 0]
        if len(set(taken)) < len(taken) or not all(feasible[i, j] for i, j in enumerate(choice) if j >= 0):
            continue
        total = sum(cost[i, j] for i, j in enumerate(choice) if j >= 0)
        best = min(best, total + fp * (n - len(taken)) + fn * (m - len(taken)))
    return best


@pytest.mark.scenario("R27.C3", on="pure")
@pytest.mark.timeout(120)
def test_the_assignment_is_the_one_that_brute_force_finds():
    chooser = random.Random(0)
    for case in range(round(40_000 * SHARE)):
        n, m = (case % 25) // 5 + 1, case % 5 + 1
        if n * m > 16 and case % 10:
            n = min(n, 3)
        iou = np.array([[chooser.choice((0.0, 0.2, 0.3, 0.5, 0.5, 0.9, 1.0)) for _ in range(m)] for _ in range(n)])
        fp, fn = chooser.choice(((1.0, 1.0), (0.3, 0.2), (0.0, 0.5)))
        feasible = iou >= 0.3
        pairs = assign(iou, feasible, fp + fn)
        total = sum(1 - iou[i, j] for i, j in pairs) + fp * (n - len(pairs)) + fn * (m - len(pairs))
        assert total == pytest.approx(least_cost(1 - iou, feasible, fp, fn)), (iou, fp, fn)
        assert all(feasible[i, j] for i, j in pairs)


@pytest.mark.scenario("R27.C3", on="pure")
def test_solving_by_groups_costs_as_little_as_solving_at_once(monkeypatch):
    chooser = np.random.default_rng(4)
    for _ in range(200):
        iou = np.where(chooser.random((20, 18)) < 0.08, chooser.choice([0.3, 0.5, 0.5, 0.9], (20, 18)), 0.0)
        feasible = iou >= 0.3
        totals = []
        for small in (0, 10_000):
            monkeypatch.setattr(assignment, "SMALL", small)
            pairs = assign(iou, feasible, 2.0)
            assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)
            totals.append((len(pairs), round(sum(iou[i, j] for i, j in pairs), 9)))
        assert totals[0] == totals[1]


def test_the_result_does_not_depend_on_the_order_of_the_truth():
    chooser = random.Random(1)
    for case in range(round(1600 * SHARE)):
        settings = RolloutMatching(maskiou_gate=0.1, candidate_top_k=case % 4 + 1)
        truth = list({random_shape(chooser) for _ in range(5)})
        predicted = [chooser.choice(truth) if chooser.random() < 0.5 else random_shape(chooser) for _ in range(5)]
        order = chooser.sample(range(len(truth)), len(truth))
        plain = match_objects(predicted, truth, settings)
        reordered = match_objects(predicted, [truth[j] for j in order], settings)
        assert {(i, order[j]) for i, j in reordered.pairs} == set(plain.pairs)
        assert {order[j] for j in reordered.missed} == set(plain.missed)
        assert reordered.false_positives == plain.false_positives
        assert np.array_equal(reordered.iou, plain.iou[:, order], equal_nan=True)


@pytest.mark.scenario("R27.C1", "R27.C6", on="pure")
def test_only_candidates_can_match():
    predicted = [box(100, 100, 200, 200), box(102, 100, 200, 200)]
    truth = [box(100, 100, 200, 200), box(110, 100, 200, 200)]
    assert len(match_objects(predicted, truth, RolloutMatching()).pairs) == 2
    assert len(match_objects(predicted, truth, RolloutMatching(candidate_top_k=1)).pairs) == 1


@pytest.mark.scenario("R27.C6", on="pure")
def test_a_candidate_is_chosen_by_its_box_even_if_another_object_has_the_better_mask():
    """The triangle has the box of the prediction, but half of its area. The smaller box covers more of it."""
    predicted, triangle, smaller = box(0, 0, 400, 400), poly(0, 0, 400, 0, 0, 400), box(20, 20, 400, 400)
    both = match_objects([predicted], [triangle, smaller], RolloutMatching())
    assert both.pairs == ((0, 1),)
    result = match_objects([predicted], [triangle, smaller], RolloutMatching(candidate_top_k=1))
    assert (result.pairs, result.missed) == (((0, 0),), (1,))
    assert np.isnan(result.iou[0, 1])


@pytest.mark.parametrize("side", [1, 2, 3])
def test_a_shape_too_thin_for_the_canvas_matches_itself(side):
    for start in range(0, 900, 7):
        for shape in (box(start, 500, start + side, 700), poly(start, 500, start + side, 500, start, 700)):
            assert match_objects([shape], [shape], RolloutMatching()).pairs == ((0, 0),)


def test_a_scene_of_hundreds_of_objects_is_matched():
    truth = [box(x, y, x + 20, y + 20) for x in range(0, 960, 40) for y in range(0, 960, 40)]
    predicted = [
        box(x + 1, y, x + 21, y + 20) for x, y, _, _ in (shape.bins for shape in truth[: len(truth) // 2])
    ]
    result = match_objects(predicted, truth, RolloutMatching())
    assert result.pairs == tuple((k, k) for k in range(len(truth) // 2))
    assert len(result.missed) == len(truth) - len(truth) // 2


@pytest.mark.scenario("R27.C2", on="pure")
def test_the_iou_of_integer_boxes_is_exact_at_a_resolution_of_1000():
    chooser = random.Random(2)
    for _ in range(500):
        left, right = (Geometry("bbox_2d", _random_box(chooser)) for _ in range(2))
        (iou,) = mask_iou(rasterise([left], 1000), rasterise([right], 1000))[0]
        assert iou == pytest.approx(_box_iou(left.bins, right.bins), abs=1e-12)


@pytest.mark.scenario("R27.C2", on="pure")
@pytest.mark.parametrize("resolution", [256, 1000])
def test_mask_iou_is_the_iou_of_the_polygons_within_the_raster_error(resolution):
    chooser = random.Random(3)
    for _ in range(300):
        left, right = (_star(chooser) for _ in range(2))
        (iou,) = mask_iou(rasterise([left], resolution), rasterise([right], resolution))[0]
        shapes = [shapely.Polygon(shape.points) for shape in (left, right)]
        union = shapes[0].union(shapes[1])
        exact = shapes[0].intersection(shapes[1]).area / union.area
        pixel = 1000 / resolution
        outline = sum(shape.length for shape in shapes)
        assert iou == pytest.approx(exact, abs=pixel * outline / union.area + 1e-9)


@pytest.mark.scenario("R27.C2", on="pure")
@pytest.mark.parametrize("resolution", [250, 1000])
def test_objects_are_compared_on_a_canvas_of_the_resolution_that_is_set(resolution):
    """On 1000 pixels, one bin is one pixel. On 250, the left edge at bin 102 lies inside a pixel."""
    settings = RolloutMatching(maskiou_resolution=resolution)
    (iou,) = match_objects([box(102, 100, 200, 200)], [box(100, 100, 200, 200)], settings).iou[0]
    assert (iou == pytest.approx(0.98, abs=1e-12)) == (resolution == 1000)
    assert iou == pytest.approx(0.98, abs=0.03)


@pytest.mark.scenario("R27.C5", on="pure")
@pytest.mark.parametrize(("gate", "matches"), [(0.49, True), (0.5, True), (0.51, False)])
def test_a_pair_at_the_gate_may_match_and_one_below_it_may_not(gate, matches):
    settings = RolloutMatching(maskiou_gate=gate, maskiou_resolution=1000)
    result = match_objects([box(100, 100, 200, 200)], [box(100, 100, 200, 300)], settings)
    assert result.iou[0, 0] == 0.5
    assert bool(result.pairs) == matches


@pytest.mark.scenario("R27.C3", on="pure")
@pytest.mark.parametrize(
    ("fp_cost", "fn_cost", "matches"), [(0.6, 0.1, True), (0.1, 0.6, True), (0.1, 0.1, False), (0.3, 0.3, True)]
)
def test_objects_are_paired_if_that_costs_less_than_to_leave_both_unmatched(fp_cost, fn_cost, matches):
    """The pair has an IoU of 0.5 and so costs 0.5."""
    settings = RolloutMatching(fp_cost=fp_cost, fn_cost=fn_cost, maskiou_resolution=1000)
    result = match_objects([box(100, 100, 200, 200)], [box(100, 100, 200, 300)], settings)
    assert bool(result.pairs) == matches


@pytest.mark.scenario("R27.C5", on="pure")
def test_a_pair_below_the_gate_is_not_assigned_even_if_both_have_better_partners():
    """Of three on each side, the second ones overlap each other too little. Each overlaps another object well
    enough, which has a better partner."""
    predicted = [box(0, 0, 100, 100), box(20, 0, 120, 100), box(80, 0, 180, 100)]
    truth = [box(0, 0, 100, 100), box(70, 0, 170, 100), box(80, 0, 180, 100)]
    match = match_objects(predicted, truth, RolloutMatching(maskiou_gate=0.5))
    assert match.iou[1, 1] < 0.5 < min(match.iou[1, 0], match.iou[2, 1])
    assert match.pairs == ((0, 0), (2, 2))
    assert len(match_objects(predicted, truth, RolloutMatching()).pairs) == 3


@pytest.mark.scenario("R27.C1", on="pure")
def test_the_candidates_of_random_boxes_are_those_of_the_definition():
    """Coordinates are coarse, so that IoUs and distances are often equal."""
    chooser = random.Random(6)
    for case in range(300):
        predicted, truth = ([_coarse_box(chooser) for _ in range(8)] for _ in range(2))
        top_k = case % 7 + 1
        chosen = choose_candidates(np.array(predicted, dtype=float), np.array(truth, dtype=float), top_k)
        for row, here in zip(chosen, predicted, strict=True):
            places = [(-_box_iou(here, true), _distance(here, true), k) for k, true in enumerate(truth)]
            assert np.flatnonzero(row).tolist() == sorted(k for *_, k in sorted(places)[:top_k])


def _random_box(chooser):
    (x1, x2), (y1, y2) = (sorted(chooser.sample(range(1000), 2)) for _ in range(2))
    return (x1, y1, x2, y2)


def _coarse_box(chooser):
    x, y = chooser.randrange(0, 800, 100), chooser.randrange(0, 800, 100)
    return (x, y, x + chooser.choice((100, 200, 300)), y + chooser.choice((100, 200, 300)))


def _distance(left, right):
    return sum((left[a] + left[a + 2] - right[a] - right[a + 2]) ** 2 for a in (0, 1))


def _box_iou(left, right):
    width = min(left[2], right[2]) - max(left[0], right[0])
    height = min(left[3], right[3]) - max(left[1], right[1])
    overlap = max(width, 0) * max(height, 0)
    areas = [(b[2] - b[0]) * (b[3] - b[1]) for b in (left, right)]
    return overlap / (sum(areas) - overlap)


def _star(chooser):
    """Return a simple polygon: vertices around a centre, sorted by angle."""
    while True:
        centre = chooser.uniform(300, 700), chooser.uniform(300, 700)
        angles = sorted(chooser.uniform(0, 6.283) for _ in range(chooser.randint(4, 9)))
        points = [
            (centre[0] + r * np.cos(a), centre[1] + r * np.sin(a))
            for a in angles
            if (r := chooser.uniform(60, 290))
        ]
        shape = Geometry("poly", tuple(int(value) for point in points for value in point))
        if shapely.Polygon(shape.points).is_valid and shapely.Polygon(shape.points).area > 2000:
            return shape


RIDER, HORSE = box(100, 100, 300, 500), box(100, 200, 400, 600)  # they overlap by 0.375
COLT = box(110, 230, 400, 640)


@pytest.mark.parametrize(
    ("classes", "names", "pairs"),
    [
        ("any", ["rider", "horse"], ((0, 0),)),  # the better of both by shape
        ("prefer", ["rider", "horse"], ((1, 0),)),
        ("same", ["rider", "horse"], ((1, 0),)),
        ("prefer", ["rider", "foal"], ((0, 0),)),  # none has the class, so shapes decide
        ("same", ["rider", "foal"], ()),
    ],
)
def test_classes_count_as_the_setting_says(classes, names, pairs):
    settings = RolloutMatching(match_classes=classes)
    result = match_objects([HORSE, COLT], [HORSE], settings, (names, ["horse"]))
    assert result.pairs == pairs
    assert result.missed == (() if pairs else (0,))


def test_an_object_that_is_left_after_its_class_takes_what_no_object_of_that_class_has():
    settings = RolloutMatching(match_classes="prefer")
    names = (["foal", "horse"], ["horse", "rider"])
    assert match_objects([HORSE, COLT], [HORSE, RIDER], settings, names).pairs == ((0, 1), (1, 0))
    names = (["foal", "rider"], ["rider", "horse"])
    assert match_objects([HORSE, RIDER], [RIDER, HORSE], settings, names).pairs == ((0, 1), (1, 0))


@pytest.mark.parametrize(("classes", "pairs"), [("any", ()), ("prefer", ((0, 2),)), ("same", ((0, 2),))])
def test_nearer_objects_of_other_classes_do_not_take_the_place_of_the_candidate_of_the_same_class(classes, pairs):
    """The two others have the box of the prediction and nearly no area in common with it."""
    sliver, edge = poly(100, 100, 400, 600, 110, 100), poly(100, 100, 400, 600, 100, 110)
    settings = RolloutMatching(match_classes=classes, candidate_top_k=2)
    names = ["horse"], ["rider", "dog", "horse"]
    assert match_objects([box(100, 100, 400, 600)], [sliver, edge, COLT], settings, names).pairs == pairs
