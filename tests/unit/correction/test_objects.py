"""The validity of predicted objects, the positions of their coordinates, and the fate of their true objects."""

import pytest

from coordexp.correction import match_objects
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
    "body",
    [
        '{"desc": "a", "bbox_2d": ["<|coord_1|>", "<|coord_2|>"',  # missing brackets
        f'{{"desc": "a",, "bbox_2d": {SQUARE}}}',  # extra comma
        f'{{"desc": "a", "bbox_2d": {SQUARE}, "score": 1}}',  # unexpected key
        f'{{"desc": "a", "box": {{"bbox_2d": {SQUARE}}}}}',  # nested
        f'{{"desc": "a", "bbox_2d": {bins(1, 2, 3)}}}',  # wrong count
        '{"desc": "a", "bbox_2d": [1, 2, 3, 4]}',  # no coordinate tokens
        f'{{"desc": "a", "geometry": {SQUARE}}}',  # invalid geometry key
        f'{{"bbox_2d": {SQUARE}}}',  # missing desc
        f'{{"desc": "", "bbox_2d": {SQUARE}}}',  # empty desc
        f'{{"desc": 5, "bbox_2d": {SQUARE}}}',  # a desc that is not text
    ],
)
def test_an_object_that_breaks_the_syntax_or_the_schema_is_invalid(core: Core, body: str) -> None:
    parsed = core.parse(answer(entry("object_1", "cup", CUP), f'"object_2": {body}'))
    assert [prediction.key for prediction in parsed.valid] == ["object_1"]
    assert any(not prediction.is_valid for prediction in parsed.objects)


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
    "body",
    [
        '{"desc": "a"}',
        f'{{"desc": "a", "bbox_2d": {SQUARE}, "poly": {coords(ROOF)}}}',
        f'{{"desc": "a", "bbox_2d": {SQUARE}, "bbox_2d": {SQUARE}}}',
        f'{{"desc": "a", "bbox_2d": [{SQUARE}]}}',
        f'{{"desc": {{"bbox_2d": {SQUARE}}}, "poly": {coords(ROOF)}}}',
        f'{{"desc": "a", "bbox_2d": {SQUARE[:-1]}',
    ],
)
def test_an_object_without_exactly_one_flat_closed_geometry_is_invalid(core: Core, body: str) -> None:
    parsed = core.parse(answer(entry("object_1", "cup", CUP), f'"object_2": {body}'))
    assert [prediction.key for prediction in parsed.valid] == ["object_1"]
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
    ],
)
def test_a_true_object_whose_prediction_is_unusable_is_missed_and_appended(core: Core, unusable: str) -> None:
    truth = [TrueObject("cup", CUP), TrueObject("dog", DOG)]
    _, match, segment = core.build(answer(f'"object_1": {unusable}', entry("object_2", "dog", DOG)), truth)
    assert [pair[1] for pair in match.pairs] == [1]
    assert core.objects(segment)["object_3"]["desc"] == "cup"


@pytest.mark.scenario("R27.C5", on="pure")
def test_a_pair_below_the_gate_is_not_assigned_even_if_both_have_better_partners(core: Core) -> None:
    """Two predictions and two true objects, of which only one pair overlaps enough."""
    predicted = [box(0, 0, 100, 100), box(80, 0, 180, 100)]
    truth = [box(0, 0, 100, 100), box(150, 0, 250, 100)]
    match = match_objects(predicted, truth, core.settings)
    assert [tuple(pair[:2]) for pair in match.pairs] == [(0, 0)]
    ungated = core.settings.model_copy(update={"maskiou_gate": 0.1})
    assert len(match_objects(predicted, truth, ungated).pairs) == 2
