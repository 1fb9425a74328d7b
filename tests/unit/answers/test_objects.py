"""The validity of predicted objects, the positions of their coordinates, and the fate of their true objects."""

import pytest

from coordexp.answers.entries import Reason
from coordexp.answers.match import match_objects
from coordexp.data import TrueObject
from tests.unit.answers.conftest import Core, answer, box, coords, entry, poly

CUP = box(10, 10, 110, 110)
DOG = box(300, 300, 500, 500)
ROOF = poly(600, 600, 800, 600, 700, 700)
SQUARE = coords(box(600, 600, 700, 700))


def bins(*numbers: int) -> str:
    return "[" + ", ".join(f'"<|coord_{number}|>"' for number in numbers) + "]"


@pytest.mark.scenario("R25.C1", "R26.C3", on="pure")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"desc": "a", "bbox_2d": ["<|coord_1|>", "<|coord_2|>"', Reason.syntax),  # missing brackets
        (f'{{"desc": "a", "bbox_2d": {SQUARE[:-1]}}}', Reason.syntax),
        (f'{{"desc": "a",, "bbox_2d": {SQUARE}}}', Reason.syntax),  # extra comma
        (f'{{"desc": "a <|image_pad|>", "bbox_2d": {SQUARE}}}', Reason.placeholder),
        (f'{{"desc": "a <|video_pad|>", "bbox_2d": {SQUARE}}}', Reason.placeholder),
    ],
)
def test_an_object_that_breaks_the_syntax_is_invalid(core: Core, body: str, reason: Reason) -> None:
    parsed = core.parse(answer(entry("object_1", "cup", CUP), f'"object_2": {body}'))
    assert [prediction.reason for prediction in parsed.objects] == [None, reason]
    assert not parsed.objects[1].coord_indices


@pytest.mark.scenario("R26.C2", on="pure")
@pytest.mark.parametrize(
    ("kind", "count", "is_valid"),
    [
        ("bbox_2d", 3, False),
        ("bbox_2d", 4, True),
        ("bbox_2d", 5, False),
        ("bbox_2d", 6, False),
        ("poly", 4, False),
        ("poly", 5, False),
        ("poly", 6, True),
        ("poly", 7, False),
        ("poly", 8, True),
    ],
)
def test_a_box_has_four_coordinates_and_a_polygon_an_even_number_of_at_least_six(
    core: Core, kind: str, count: int, is_valid: bool
) -> None:
    corners = (100, 100, 400, 300) if kind == "bbox_2d" else (100, 100, 400, 100, 400, 400, 100, 400)
    numbers = (*corners, 7, 9)[:count]
    parsed = core.parse(answer(f'"object_1": {{"desc": "a", "{kind}": {bins(*numbers)}}}'))
    (prediction,) = parsed.objects
    assert prediction.is_valid == is_valid
    assert len(prediction.coord_indices) == (count if is_valid else 0)


@pytest.mark.scenario("R27.C4", on="pure")
@pytest.mark.parametrize(
    "unusable",
    [
        f'{{"desc": "", "bbox_2d": {coords(CUP)}}}',
        '{"desc": "cup", "bbox_2d": [10, 10, 110, 110]}',
        '{"desc": "cup", "bbox_2d": ["<|coord_10|>", "<|coord_10|>", "<|coord_110|>"]}',
        f'{{"desc": "cup <|coord_5|>", "bbox_2d": {coords(CUP)}}}',
        f'{{"desc": "cup", "bbox_2d": {coords(CUP)}, "score": 1}}',
        f'{{"desc": "cup", "poly": [], "bbox_2d": {coords(CUP)}}}',
    ],
)
def test_a_true_object_whose_prediction_is_unusable_is_missed_and_appended(core: Core, unusable: str) -> None:
    truth = [TrueObject("cup", CUP), TrueObject("dog", DOG)]
    _, match, segment = core.build(answer(f'"object_1": {unusable}', entry("object_2", "dog", DOG)), truth)
    assert [pair[1] for pair in match.pairs] == [1]
    assert core.objects(segment)["object_3"]["desc"] == "cup"


@pytest.mark.scenario("R27.C5", on="pure")
def test_a_pair_below_the_gate_is_not_assigned_even_if_both_have_better_partners(core: Core) -> None:
    """Of three on each side, the second ones overlap each other too little. Each overlaps another object well
    enough, which has a better partner."""
    predicted = [box(0, 0, 100, 100), box(20, 0, 120, 100), box(80, 0, 180, 100)]
    truth = [box(0, 0, 100, 100), box(70, 0, 170, 100), box(80, 0, 180, 100)]
    gated = core.settings.model_copy(update={"maskiou_gate": 0.5})
    match = match_objects(predicted, truth, gated)
    assert match.iou[1, 1] < 0.5 < min(match.iou[1, 0], match.iou[2, 1])
    assert match.pairs == ((0, 0), (2, 2))
    assert len(match_objects(predicted, truth, core.settings).pairs) == 3
