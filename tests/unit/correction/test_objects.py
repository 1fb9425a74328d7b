"""The validity of predicted objects, the positions of their coordinates, and the fate of their true objects."""

import pytest

from coordexp.correction import Reason, match_objects
from coordexp.data import Geometry, TrueObject
from coordexp.vocab import COORD_TOKENS
from tests.unit.correction.conftest import Core, answer, box, coords, entry, poly
from tests.vocabularies import encode

CUP = box(10, 10, 110, 110)
DOG = box(300, 300, 500, 500)
ROOF = poly(600, 600, 800, 600, 700, 700)
SQUARE = coords(box(600, 600, 700, 700))


def bins(*numbers: int) -> str:
    return "[" + ", ".join(f'"<|coord_{number}|>"' for number in numbers) + "]"


@pytest.mark.scenario("R25.C1", on="pure")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"desc": "a", "bbox_2d": ["<|coord_1|>", "<|coord_2|>"', Reason.syntax),  # missing brackets
        (f'{{"desc": "a",, "bbox_2d": {SQUARE}}}', Reason.syntax),  # extra comma
        (f'{{"desc": "a", "bbox_2d": {SQUARE}, "score": 1}}', Reason.unexpected_key),
        (f'{{"desc": "a", "box": {{"bbox_2d": {SQUARE}}}}}', Reason.unexpected_key),  # nested
        (f'{{"desc": "a", "bbox_2d": {bins(1, 2, 3)}}}', Reason.wrong_count),
        ('{"desc": "a", "bbox_2d": [1, 2, 3, 4]}', Reason.bad_geometry),  # no coordinate tokens
        (f'{{"desc": "a", "geometry": {SQUARE}}}', Reason.unexpected_key),  # invalid geometry key
        (f'{{"bbox_2d": {SQUARE}}}', Reason.missing_desc),
        (f'{{"desc": "", "bbox_2d": {SQUARE}}}', Reason.empty_desc),
        (f'{{"desc": " \\t", "bbox_2d": {SQUARE}}}', Reason.empty_desc),
        (f'{{"desc": 5, "bbox_2d": {SQUARE}}}', Reason.missing_desc),  # a desc that is not text
        (f'{{"desc": "a", "desc": "a", "bbox_2d": {SQUARE}}}', Reason.repeated_field),
        (f'{{"desc": "a", "poly": [], "bbox_2d": {SQUARE}}}', Reason.two_geometries),
        (f'{{"desc": "a", "bbox_2d": {bins(700, 600, 600, 700)}}}', Reason.degenerate),  # inverted
        (f'{{"desc": "a", "bbox_2d": {bins(600, 700, 700, 600)}}}', Reason.degenerate),
        (f'{{"desc": "a", "bbox_2d": {bins(600, 600, 600, 700)}}}', Reason.degenerate),  # without area
        (f'{{"desc": "a", "bbox_2d": {bins(600, 600, 700, 600)}}}', Reason.degenerate),
        (f'{{"desc": "a", "poly": {bins(1, 1, 2, 2, 3, 3)}}}', Reason.degenerate),
        (f'{{"desc": "a <|coord_5|>", "bbox_2d": {SQUARE}}}', Reason.stray_coord),
        (f'{{"desc": "a <|image_pad|>", "bbox_2d": {SQUARE}}}', Reason.placeholder),
        (f'{{"desc": "a <|video_pad|>", "bbox_2d": {SQUARE}}}', Reason.placeholder),
    ],
)
def test_an_object_that_breaks_the_syntax_or_the_schema_is_invalid(core: Core, body: str, reason: Reason) -> None:
    parsed = core.parse(answer(entry("object_1", "cup", CUP), f'"object_2": {body}'))
    assert [prediction.reason for prediction in parsed.objects] == [None, reason]


@pytest.mark.scenario("R25.C1", on="pure")
@pytest.mark.parametrize(
    ("key", "reason"), [("object_1", Reason.repeated_key), ("cup", Reason.bad_key), ("object_2b", Reason.bad_key)]
)
def test_an_object_with_a_key_that_was_used_or_has_no_number_is_invalid(
    core: Core, key: str, reason: Reason
) -> None:
    parsed = core.parse(answer(entry("object_1", "cup", CUP), entry(key, "dog", DOG)))
    assert [prediction.reason for prediction in parsed.objects] == [None, reason]


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


@pytest.mark.scenario("R26.C3", on="pure")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"desc": "a"}', Reason.missing_geometry),
        (f'{{"desc": "a", "bbox_2d": {SQUARE}, "poly": {coords(ROOF)}}}', Reason.two_geometries),
        (f'{{"desc": "a", "bbox_2d": {SQUARE}, "bbox_2d": {SQUARE}}}', Reason.repeated_field),
        (f'{{"desc": "a", "bbox_2d": [], "bbox_2d": {SQUARE}}}', Reason.repeated_field),
        (f'{{"desc": "a", "bbox_2d": [{SQUARE}]}}', Reason.bad_geometry),
        (f'{{"desc": {{"bbox_2d": {SQUARE}}}, "poly": {coords(ROOF)}}}', Reason.missing_desc),
        (f'{{"desc": "a", "bbox_2d": {SQUARE[:-1]}', Reason.syntax),
    ],
)
def test_an_object_without_exactly_one_flat_closed_geometry_is_invalid(
    core: Core, body: str, reason: Reason
) -> None:
    parsed = core.parse(answer(entry("object_1", "cup", CUP), f'"object_2": {body}'))
    assert [prediction.reason for prediction in parsed.objects] == [None, reason]
    assert not any(prediction.coord_indices for prediction in parsed.objects if not prediction.is_valid)


@pytest.mark.scenario("R23.C2", on="pure")
@pytest.mark.parametrize("geometry", [CUP, ROOF])
def test_the_geometry_of_a_polygon_or_a_box_may_precede_its_description(core: Core, geometry: Geometry) -> None:
    for geometry_first in (False, True):
        parsed = core.parse(answer(entry("object_1", "a", geometry, geometry_first=geometry_first)))
        (prediction,) = parsed.valid
        assert (prediction.desc, prediction.geometry) == ("a", geometry)


@pytest.mark.scenario("R23.C1", on="pure")
@pytest.mark.parametrize(
    "body",
    [
        f'{{"bbox_2d": {SQUARE}, "desc": ""}}',
        f'{{"bbox_2d": {SQUARE}, "desc": 5}}',
        f'{{"bbox_2d": {bins(1, 2, 3)}, "desc": "a"}}',
        f'{{"bbox_2d": {SQUARE}, "desc": "a", "score": 1}}',
        '{"bbox_2d": [1, 2, 3, 4], "desc": "a"}',
    ],
)
def test_the_strict_checks_also_apply_with_the_geometry_first(core: Core, body: str) -> None:
    parsed = core.parse(answer(entry("object_1", "cup", CUP), f'"object_2": {body}'))
    assert [prediction.key for prediction in parsed.valid] == ["object_1"]


@pytest.mark.scenario("R26.C6", on="pure")
@pytest.mark.parametrize("quoted", [True, False])
@pytest.mark.parametrize("geometry", [CUP, ROOF])
def test_every_coordinate_token_of_the_geometry_has_a_position(
    core: Core, geometry: Geometry, quoted: bool
) -> None:
    text = answer(entry("object_1", "a", geometry, quoted=quoted))
    ids = encode(text, core.table)
    (prediction,) = core.parse(text).valid
    first = core.table.first_coord
    positions = [place for place, id in enumerate(ids) if first <= id < first + len(COORD_TOKENS)]
    assert list(prediction.coord_indices) == positions
    assert tuple(ids[place] - first for place in prediction.coord_indices) == geometry.bins


@pytest.mark.scenario("R22.C2", on="pure")
@pytest.mark.parametrize("order", ["desc_first", "geometry_first"])
@pytest.mark.parametrize("geometry", [CUP, ROOF])
def test_an_appended_object_names_its_kind_of_geometry(core: Core, geometry: Geometry, order: str) -> None:
    _, _, segment = core.build("{}", [TrueObject("a", geometry)], order=order)
    (written,) = core.objects(segment).values()
    assert set(written) == {"desc", geometry.kind}


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
