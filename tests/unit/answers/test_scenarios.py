"""The scenarios of the token core, each on the real Qwen vocabulary and on a small trained one."""

import re
import subprocess
import sys
import time

import numpy as np
import pytest

from coordexp.answers.correct import correct
from coordexp.answers.entries import Reason
from coordexp.answers.parse import parse_rollout
from coordexp.answers.segment import Role, TokenKind
from coordexp.answers.target import build_target
from coordexp.data import Geometry, TrueObject
from tests.unit.answers.conftest import PROMPT, Core, answer, box, coords, entry, poly
from tests.vocabularies import encode, table

CUP = TrueObject("red cup", box(10, 10, 110, 110))
DOG = TrueObject("dog", box(300, 300, 500, 500))
ROOF = TrueObject("roof", poly(600, 600, 800, 600, 700, 700))
NEAR_CUP = box(12, 8, 111, 108)
TILE = TrueObject("tile", box(600, 600, 700, 700))
SQUARE = coords(TILE.geometry)


@pytest.mark.scenario("R19.S2", on="pure")
def test_the_first_appended_key_follows_the_highest_key_kept_even_of_an_invalid_object(core):
    text = answer(entry("object_2", "red cup", NEAR_CUP), '"object_9": {"desc": "x"}')
    parsed, _, segment = core.build(text, [DOG])
    assert [prediction.reason for prediction in parsed.objects] == [None, Reason.missing_geometry]
    assert parsed.highest_number == 9
    assert list(core.objects(segment)) == ["object_2", "object_9", "object_10"]


@pytest.mark.scenario("R19.S2", "R19.C9", on="pure")
@pytest.mark.parametrize("lost", ['"object_9": 3', '"object_9": 3}', '"object_9": {"desc": "x"', '"object_9": !}'])
def test_the_key_of_an_entry_that_is_cut_off_does_not_count_for_the_first_appended_key(core, lost):
    parsed, _, segment = core.build("{" + entry("object_2", "red cup", NEAR_CUP) + ", " + lost, [DOG])
    assert len(parsed.objects) == 2
    assert list(core.objects(segment)) == ["object_2", "object_3"]


@pytest.mark.scenario("R19.C9", "R21.C1", "R21.S1", on="pure")
@pytest.mark.parametrize(
    ("text", "kept"),
    [("", 0), ("no idea", 0), ("{", 0), ("{}", 0), (answer(entry("object_1", "x", box(900, 900, 990, 990))), 1)],
)
def test_all_true_objects_are_appended_when_nothing_matches(core, text, kept):
    _, match, segment = core.build(text, [CUP, DOG, ROOF])
    assert match.missed == (0, 1, 2)
    written = core.objects(segment)
    assert list(written) == [f"object_{number}" for number in range(1, kept + 4)]
    assert [item["desc"] for item in written.values()][kept:] == ["red cup", "dog", "roof"]


@pytest.mark.scenario("R22.C1", "R22.C2", "R22.C3", "R22.S1", on="pure")
def test_geometry_first_changes_only_the_field_order(core):
    text = answer(entry("object_4", "red cup", NEAR_CUP))
    *_, plain = core.build(text, [CUP, DOG, ROOF])
    *_, swapped = core.build(text, [CUP, DOG, ROOF], order="geometry_first")
    assert core.objects(swapped) == core.objects(plain)
    assert list(core.objects(swapped)) == ["object_4", "object_5", "object_6"]
    assert list(core.objects(swapped)["object_5"]) == ["bbox_2d", "desc"]
    assert list(core.objects(swapped)["object_6"]) == ["poly", "desc"]
    assert "geometry" not in core.answer(swapped)


@pytest.mark.scenario("R22.C1", "R22.S2", on="pure")
def test_desc_first_is_the_baseline_layout(core):
    *_, segment = core.build("", [CUP, ROOF])
    assert core.answer(segment) == answer(
        entry("object_1", "red cup", CUP.geometry), entry("object_2", "roof", ROOF.geometry)
    )


@pytest.mark.scenario("R23.C1", "R23.C2", "R23.S1", on="pure")
@pytest.mark.parametrize("quoted", [True, False])
@pytest.mark.parametrize("shape", [NEAR_CUP, ROOF.geometry])
def test_an_object_with_its_geometry_first_is_valid(core, shape, quoted):
    (plain,) = core.parse(answer(entry("object_1", "a", shape, quoted=quoted))).objects
    (swapped,) = core.parse(answer(entry("object_1", "a", shape, quoted=quoted, geometry_first=True))).objects
    assert plain.is_valid
    assert swapped.is_valid
    assert swapped[:4] == plain[:4]


@pytest.mark.scenario("R24.S1", on="pure")
@pytest.mark.parametrize("numbers", [(10, 2), (2, 10), (3, 20, 1), (20, 3, 100)])
def test_objects_keep_the_order_of_the_text(core, numbers):
    """This is neither the order of the numbers nor the order of the keys as text: each is wrong for one of
    the cases."""
    keys = [f"object_{number}" for number in numbers]
    places = [box(10 + 300 * k, 10, 200 + 300 * k, 110) for k in range(len(keys))]
    text = answer(*(entry(key, "cup", place) for key, place in zip(keys, places, strict=True)))
    parsed, match, segment = core.build(text, [TrueObject("cup", place) for place in reversed(places)])
    assert [prediction.key for prediction in parsed.objects] == keys
    assert [prediction.geometry for prediction in parsed.valid] == places
    assert match.pairs == tuple((k, len(keys) - 1 - k) for k in range(len(keys)))
    assert list(core.objects(segment)) == keys


@pytest.mark.scenario("R23.C1", "R25.C1", "R25.C2", "R25.S1", "R26.C3", "R27.C4", on="pure")
@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        ('{"desc": "a", "bbox_2d": [1, 2, 3, 4]}', Reason.bad_geometry),
        ('{"desc": "a", "bbox_2d": "<|coord_1|>"}', Reason.bad_geometry),
        ('{"desc": "a", "bbox_2d": [["<|coord_1|>"]]}', Reason.bad_geometry),
        ('{"desc": "a"}', Reason.missing_geometry),
        ("{}", Reason.missing_geometry),
        ('{"bbox_2d": %s}' % SQUARE, Reason.missing_desc),
        ('{"desc": 3, "bbox_2d": %s}' % SQUARE, Reason.missing_desc),
        ('{"desc": "  ", "bbox_2d": %s}' % SQUARE, Reason.empty_desc),
        ('{"desc": "a", "bbox_2d": %s, "score": 1}' % SQUARE, Reason.unexpected_key),
        ('{"desc": "a", "desc": "b", "bbox_2d": %s}' % SQUARE, Reason.repeated_field),
        ('{"desc": "a", "poly": [], "bbox_2d": %s}' % SQUARE, Reason.two_geometries),
        ('{"desc": "a <|coord_5|>", "bbox_2d": %s}' % SQUARE, Reason.stray_coord),
        ('{"desc": "a", "box": {"bbox_2d": %s}}' % SQUARE, Reason.unexpected_key),
        ('{"desc": "a", "geometry": %s}' % SQUARE, Reason.unexpected_key),
        ('{"desc": {"bbox_2d": %s}, "poly": %s}' % (SQUARE, SQUARE), Reason.missing_desc),
        ('{"desc": "a", "bbox_2d": [], "bbox_2d": %s}' % SQUARE, Reason.repeated_field),
        ('{"desc": "a", "bbox_2d": %s, "poly": %s}' % (SQUARE, SQUARE), Reason.two_geometries),
        ('{"bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>"], "desc": "a"}', Reason.wrong_count),
        ('{"bbox_2d": [1, 2, 3, 4], "desc": "a"}', Reason.bad_geometry),
        ('{"bbox_2d": %s, "desc": ""}' % SQUARE, Reason.empty_desc),
        ('{"bbox_2d": %s, "desc": 5}' % SQUARE, Reason.missing_desc),
        ('{"bbox_2d": %s, "desc": "a", "score": 1}' % SQUARE, Reason.unexpected_key),
        *(
            ('{"desc": "a", "bbox_2d": %s}' % coords(box(*corners)), Reason.degenerate)
            for corners in ((3, 2, 1, 4), (1, 4, 3, 2), (1, 2, 1, 4), (1, 2, 3, 2))
        ),
        ('{"desc": "a", "poly": %s}' % coords(poly(1, 1, 2, 2, 3, 3)), Reason.degenerate),
        ("5", Reason.not_a_mapping),
        ('["<|coord_1|>"]', Reason.not_a_mapping),
        ("<|coord_1|>", Reason.not_a_mapping),
    ],
)
def test_a_malformed_middle_object_leaves_its_neighbours_usable(core, middle, reason):
    text = answer(
        entry("object_1", "red cup", NEAR_CUP), f'"object_2": {middle}', entry("object_3", "dog", DOG.geometry)
    )
    parsed, match, segment = core.build(text, [CUP, DOG, TILE])
    assert [prediction.reason for prediction in parsed.objects] == [None, reason, None]
    assert match.pairs == ((0, 0), (1, 1))
    assert list(core.objects(segment)) == ["object_1", "object_2", "object_3", "object_4"]
    assert core.objects(segment)["object_4"]["desc"] == "tile", "an object that is not valid is no match"
    for prediction, true in zip(parsed.valid, (NEAR_CUP, DOG.geometry), strict=True):
        ids = segment.ids[segment.prompt_length :][list(prediction.coord_indices)] - core.table.first_coord
        assert tuple(ids.tolist()) == true.bins


@pytest.mark.scenario("R26.C2", on="pure")
@pytest.mark.parametrize(
    ("kind", "count", "is_valid"),
    [("bbox_2d", count, count == 4) for count in range(3, 7)]
    + [("poly", count, count in (6, 8)) for count in range(4, 9)],
)
def test_a_box_has_four_coordinates_and_a_polygon_an_even_number_of_at_least_six(core, kind, count, is_valid):
    corners = (100, 100, 400, 300) if kind == "bbox_2d" else (100, 100, 400, 100, 400, 400, 100, 400)
    shape = Geometry(kind, (*corners, 7, 9)[:count])
    (prediction,) = core.parse(answer(f'"object_1": {{"desc": "a", "{kind}": {coords(shape)}}}')).objects
    assert prediction.is_valid == is_valid
    assert len(prediction.coord_indices) == (count if is_valid else 0)


@pytest.mark.scenario("R19.C9", "R25.C1", on="pure")
@pytest.mark.parametrize(
    ("key", "reason", "highest"),
    [
        ("object_007", None, 7),
        ("object_0", None, 1),
        ("object_-1", Reason.bad_key, 1),
        ("object_", Reason.bad_key, 1),
        ("object_1.5", Reason.bad_key, 1),
        ("Object_5", Reason.bad_key, 1),
        ("object_" + "9" * 17, None, 10**17 - 1),
        ("object_" + "9" * 18, None, 1),
        ("object_" + "9" * 5000, Reason.bad_key, 1),
        ("object_1", Reason.repeated_key, 1),
        ("object\\u005f1", Reason.repeated_key, 1),
        ("object_٣", Reason.bad_key, 1),
    ],
)
def test_only_keys_of_the_form_object_n_are_valid_and_numbering_continues_from_the_highest(
    core, key, reason, highest
):
    second = entry("KEY", "dog", DOG.geometry).replace("KEY", key)
    parsed, _, segment = core.build(answer(entry("object_1", "red cup", NEAR_CUP), second), [ROOF])
    assert [prediction.reason for prediction in parsed.objects] == [None, reason]
    assert parsed.highest_number == highest
    assert list(core.objects(segment))[-1] == f"object_{highest + 1}"
    again = parse_rollout(segment.ids[segment.prompt_length :].tolist(), core.table)
    assert again.objects[-1].is_valid


@pytest.mark.scenario("R25.S2", "R26.C5", on="pure")
@pytest.mark.parametrize("stop", [True, False])
def test_a_truncated_answer_is_cut_behind_its_last_complete_object(core, stop):
    whole = answer(entry("object_1", "red cup", NEAR_CUP), entry("object_2", "dog", DOG.geometry))
    first_end = whole.index("}") + 1
    for end in range(len(whole)):
        if "<|" in whole[:end] and "|>" not in whole[whole.rindex("<|", 0, end) : end]:
            continue  # half of a coordinate's text is not half of a token
        parsed, _, segment = core.build(whole[:end], [CUP, DOG], stop=stop)
        assert parsed.truncated is (end > 0)
        assert list(core.objects(segment)) == ["object_1", "object_2"]
        assert len(parsed.valid) == (0 if end < first_end else 1 if end < len(whole) - 1 else 2)
        kept = core.table.bytes_of(parsed.prefix_ids) + parsed.remainder
        assert whole.encode().startswith(kept)
        assert kept.endswith((b"{", b"}"))


def spell_coords(core, text: str, which: slice) -> list[int]:
    """Return the ids of `text`, with the coordinates in `which` spelled byte by byte in ordinary tokens."""
    runs = re.split(r"(<\|coord_[0-9]+\|>)", text)
    spelled = set(runs[1::2][which])
    assert spelled
    return [
        id
        for run in runs
        for id in (
            [core.table.byte_ids[byte] for byte in run.encode()]
            if run in spelled
            else core.table.encode(run.encode())
        )
    ]


@pytest.mark.scenario("R25.C1", "R26.S1", on="pure")
@pytest.mark.parametrize("which", [slice(None), slice(1), slice(2, 3), slice(3, None)])
@pytest.mark.parametrize("shape", [box(10, 12, 111, 113), poly(600, 601, 802, 603, 704, 705)])
def test_an_object_with_coordinates_in_ordinary_tokens_is_not_matched_and_its_true_object_is_appended(
    core, which, shape
):
    """From ids to segment. The geometry can be read and is exactly the true one, but a coordinate that is
    spelled in several tokens has no single position to supervise."""
    true = TrueObject("red cup", shape)
    text = answer(entry("object_1", "red cup", shape), entry("object_2", "dog", DOG.geometry))
    ids = spell_coords(core, text, slice(*which.indices(len(shape.bins))))
    assert core.table.bytes_of(ids).decode() == text
    correction = correct(PROMPT, ids, [true, DOG], table=core.table, order="desc_first", settings=core.settings)
    prediction, dog = correction.parsed.objects
    assert (prediction.reason, prediction.is_valid, prediction.coord_indices) == (Reason.ambiguous, False, ())
    assert (correction.match.pairs, correction.match.missed) == (((0, 1),), (0,))
    tail = len(PROMPT) + len(correction.parsed.prefix_ids)
    supervised = np.flatnonzero(correction.segment.weights[:tail])
    assert supervised.tolist() == [len(PROMPT) + index for index in dog.coord_indices]
    assert np.flatnonzero(~np.isnan(correction.segment.coord_targets[:tail])).tolist() == supervised.tolist()
    written = core.objects(correction.segment)
    assert list(written) == ["object_1", "object_2", "object_3"]
    assert written["object_3"] == written["object_1"], "the true object, in coordinate tokens"
    appended = correction.segment.roles == Role.tail_coord
    assert correction.segment.coord_targets[appended].tolist() == list(shape.bins)
    assert (correction.segment.ids[appended] - core.table.first_coord).tolist() == list(shape.bins)
    in_tokens = correct(
        PROMPT,
        core.table.encode(text.encode()),
        [true, DOG],
        table=core.table,
        order="desc_first",
        settings=core.settings,
    )
    assert in_tokens.match.pairs == ((0, 0), (1, 1)), "the same text in coordinate tokens is matched"


@pytest.mark.scenario("R26.C1", "R26.C6", on="pure")
@pytest.mark.parametrize("shape", [NEAR_CUP, poly(600, 601, 802, 603, 704, 705, 650, 690)])
@pytest.mark.parametrize("geometry_first", [True, False])
@pytest.mark.parametrize("quoted", [True, False])
def test_coordinate_positions_come_from_the_structure_of_the_answer_and_not_from_a_search(
    core, shape, geometry_first, quoted
):
    """Every object has the same bins, but its own positions, one per coordinate."""
    entries = [entry(f"object_{k}", "cup", shape, geometry_first=geometry_first, quoted=quoted) for k in (1, 2, 3)]
    text = answer(*entries)
    ids = core.table.encode(text.encode())
    coords = [index for index, id in enumerate(ids) if core.table.is_coord(id)]
    count = len(shape.bins)
    assert [prediction.coord_indices for prediction in parse_rollout(ids, core.table).objects] == [
        tuple(coords[count * k : count * (k + 1)]) for k in range(3)
    ]
    assert tuple(ids[place] - core.table.first_coord for place in coords[:count]) == shape.bins


@pytest.mark.scenario("R27.S1", on="pure")
@pytest.mark.parametrize("near_miss", [box(80, 80, 180, 180), box(48, 48, 148, 148)])
def test_a_prediction_below_the_gate_everywhere_matches_nothing(core, near_miss):
    parsed, match, segment = core.build(answer(entry("object_1", "red cup", near_miss)), [CUP, DOG])
    assert len(parsed.valid) == 1
    assert (match.pairs, match.missed, match.false_positives, match.gate_rejections) == ((), (0, 1), (0,), 1)
    assert list(core.objects(segment)) == ["object_1", "object_2", "object_3"]


@pytest.mark.scenario("R19.C1", "R29.C5", "R29.S1", on="pure")
def test_matched_coordinates_are_supervised_and_the_text_of_the_prefix_is_not(core):
    ghost = box(850, 850, 950, 950)
    text = answer(entry("object_1", "red cup", NEAR_CUP), entry("object_2", "ghost", ghost))
    parsed, _, segment = core.build(text, [CUP, DOG])
    start, tail = segment.prompt_length, segment.prompt_length + len(parsed.prefix_ids)
    supervised = np.flatnonzero(segment.weights)
    in_prefix = supervised[supervised < tail]
    assert in_prefix.tolist() == [start + index for index in parsed.valid[0].coord_indices]
    assert segment.coord_targets[in_prefix].tolist() == list(CUP.geometry.bins)
    assert (segment.roles[:start] == Role.prompt).all()
    assert core.tokens(segment, Role.tail_coord) == [f"<|coord_{bin}|>" for bin in DOG.geometry.bins]
    assert "".join(core.tokens(segment, Role.tail_desc)) == "dog"
    structure = "".join(core.tokens(segment, Role.tail_structure))
    assert structure.endswith(', "object_3": {"desc": "", "bbox_2d": ["", "", "", ""]}}')
    assert core.tokens(segment, Role.end_of_turn) == ["<|im_end|>"]
    desc = "".join(core.table.pieces[id].decode() for id in segment.ids[segment.kinds == TokenKind.desc])
    assert desc == "red cupghostdog"
    assert (segment.kinds == TokenKind.coord).sum() == 12
    tail_coords = segment.roles == Role.tail_coord
    assert segment.coord_targets[tail_coords].tolist() == list(DOG.geometry.bins)
    supervised_roles = {Role.matched_coord, Role.tail_structure, Role.tail_desc, Role.tail_coord, Role.end_of_turn}
    assert [weight == 1 for weight in segment.weights] == [role in supervised_roles for role in segment.roles]


@pytest.mark.scenario("R29.C5", on="pure")
def test_a_token_that_ends_a_description_and_goes_on_behind_it_is_structure():
    """On the real vocabulary, the bracket, the quote and the comma are one token. It is not masked with desc."""
    core = Core(table("qwen"))
    *_, segment = core.build("", [TrueObject("cup (red)", CUP.geometry)])
    assert b')",' in [core.table.pieces[id] for id in segment.ids[segment.roles == Role.tail_structure]]
    assert "".join(core.tokens(segment, Role.tail_desc)) == "cup (red"


@pytest.mark.scenario("R30.S1", on="pure")
def test_a_supervised_position_outside_the_answer_is_an_error(core):
    parsed, match, _ = core.build(answer(entry("object_1", "red cup", NEAR_CUP)), [CUP])
    for indices in ((-1, 2, 3, 4), (1, 2, 3, 10_000), (1, 2, 3, len(parsed.prefix_ids))):
        wrong = parsed.objects[0]._replace(coord_indices=indices)
        spoiled = type(parsed)((wrong,), *[getattr(parsed, name) for name in list(parsed.__slots__)[1:]])
        with pytest.raises(ValueError, match="lie outside the kept prefix"):
            build_target(
                PROMPT, spoiled, match, [CUP], table=core.table, order="desc_first", settings=core.settings
            )


@pytest.mark.scenario("R30.C1", "R30.C2", on="pure")
def test_no_token_of_the_prompt_is_supervised_even_where_it_is_a_coordinate(core):
    prompt = [*PROMPT, *core.table.encode(answer(entry("object_1", "red cup", NEAR_CUP)).encode())]
    ids = core.table.encode(answer(entry("object_1", "red cup", NEAR_CUP)).encode())
    segment = correct(
        prompt, ids, [CUP, DOG], table=core.table, order="desc_first", settings=core.settings
    ).segment
    assert segment.ids[: len(prompt)].tolist() == prompt
    assert segment.prompt_length == len(prompt)
    assert not segment.weights[: len(prompt)].any()
    assert np.isnan(segment.coord_targets[: len(prompt)]).all()
    assert (segment.roles[: len(prompt)] == Role.prompt).all()
    assert (segment.roles == Role.matched_coord).sum() == 4


@pytest.mark.scenario("R35.C1", "R35.S1", on="pure")
def test_parsing_is_importable_without_the_trainer():
    code = (
        "import coordexp.answers.correct, coordexp.answers.formats, coordexp.data, sys;"
        "heavy = {'torch', 'transformers', 'vllm', 'coordexp.train'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.scenario("R25.C1", "R26.C3", on="pure")
@pytest.mark.parametrize(
    ("text", "reason", "truncated"),
    [
        ('{"object_1": tru', Reason.truncated, True),
        ('{"object_1": -', Reason.truncated, True),
        ('{"object_1": 1.', Reason.truncated, True),
        ('{"object_1": {"desc": "a\\u00', Reason.truncated, True),
        ('{"object_1": {"desc": "a\\ud83d\\u', Reason.truncated, True),
        ('{"object_1": {"desc": "a\\1', Reason.syntax, False),
        ('{"object_1": {"desc": "a\\udc00', Reason.syntax, False),
        ('{"object_1": xyz}', Reason.syntax, False),
        ('{"object_1": trux', Reason.syntax, False),
        ('{"object_1": 01}', Reason.syntax, False),
        ('{"object_1" {', Reason.syntax, False),
        ('{<|image_pad|>"object_1": {}}', Reason.placeholder, False),
        ('{"object_1": {}, <|image_pad|>"object_2": {}}', Reason.placeholder, False),
        ('{"object_1": {"desc": "a <|video_pad|>", "bbox_2d": %s}}' % SQUARE, Reason.placeholder, False),
        ('{"object_1": {"desc": "a", "bbox_2d": %s}}' % SQUARE[:-1], Reason.syntax, False),
        ('{"object_1": {"desc": "a",, "bbox_2d": %s}}' % SQUARE, Reason.syntax, False),
    ],
)
def test_an_answer_that_stops_is_distinguished_from_one_that_breaks(core, text, reason, truncated):
    parsed = core.parse(text)
    assert (parsed.objects[-1].reason, parsed.objects[-1].coord_indices) == (reason, ())
    assert parsed.truncated is truncated


def test_an_answer_that_stops_between_objects_loses_none(core):
    first = entry("object_1", "red cup", NEAR_CUP)
    for text in ("{", "{ ", "{" + first, "{" + first + ",", "{" + first + ", "):
        parsed = core.parse(text)
        assert parsed.truncated
        assert all(prediction.is_valid for prediction in parsed.objects)


FIVE = [entry(f"object_{n}", "cup", box(10 * n, 10, 10 * n + 9, 20)) for n in range(1, 6)]
NO_COLON = FIVE[1].replace('"object_2":', '"object_2"')
IMAGE_IN_DESC = FIVE[1].replace("cup", "<|image_pad|>")
NESTED = '"object_1": {"desc": "a", "object_2": {"desc": "b"}}'


@pytest.mark.scenario("R31.C1", on="pure")
@pytest.mark.parametrize(
    ("text", "valid", "reasons", "unread"),
    [
        (answer(*FIVE), 5, [], 0),
        (answer(FIVE[0], '"object_2": nonsense', *FIVE[2:]), 1, [Reason.syntax], 3),
        (answer(FIVE[0], FIVE[1][:-1], *FIVE[2:]), 1, [Reason.unexpected_key], 0),  # the rest is inside object 2
        (answer(FIVE[0] + " " + FIVE[1], *FIVE[2:]), 1, [Reason.syntax], 3),
        (
            answer(FIVE[0], "and so on", *FIVE[1:]),
            1,
            [Reason.syntax],
            3,
        ),  # one of the four counts as the break
        (answer(FIVE[0], NO_COLON, *FIVE[2:]), 1, [Reason.syntax], 2),  # `"object_2" {` is not a key
        (answer(FIVE[0], IMAGE_IN_DESC, *FIVE[2:]), 1, [Reason.placeholder], 3),
        (answer('"object_1": 5', '"object_2": !', *FIVE[2:]), 0, [Reason.not_a_mapping, Reason.syntax], 3),
        ("{" + ", ".join(FIVE)[:-10], 4, [Reason.truncated], 0),
        ("{" + ", ".join(FIVE), 5, [], 0),
        ("{" + ", ".join(FIVE[:3]) + ", ", 3, [], 0),
        (answer(*FIVE[:2]) + ", " + ", ".join(FIVE[2:]) + "}", 2, [], 3),  # a brace too many
        ("Sure! " + answer(*FIVE), 0, [], 5),
        ("[" + ", ".join(FIVE) + "]", 0, [], 5),
        ("", 0, [], 0),
        ("object_1 and object_2: nothing", 0, [], 0),
        (answer(NESTED), 0, [Reason.unexpected_key], 0),
        (answer('"object_1": {"desc": "the \\"object_7\\": sign", !'), 0, [Reason.syntax], 0),
        (answer('"object_1": !', FIVE[1].replace('":', '" \n:', 1)), 0, [Reason.syntax], 1),
        (answer('"object_1": !') + "<|im_end|>" + answer(*FIVE), 0, [Reason.syntax], 0),
    ],
)
def test_objects_behind_a_break_are_counted_by_their_keys(core, text, valid, reasons, unread):
    parsed = core.parse(text)
    assert len(parsed.valid) == valid
    assert [prediction.reason for prediction in parsed.objects if not prediction.is_valid] == reasons
    assert parsed.unread == unread


def test_counting_keys_takes_one_pass_whatever_the_text(core):
    """A million bytes of text that looks like the beginning of a key again and again take well below a second."""
    spaces = " " * 10**6
    for soup in ('"object_1" ' * 100_000, '"object_' * 120_000, f'"object_1"{spaces}', '"object_1":' * 100_000):
        began = time.perf_counter()
        parsed = parse_rollout([core.table.byte_ids[byte] for byte in f"!{soup}".encode()], core.table)
        assert time.perf_counter() - began < 5
        assert parsed.unread == soup.count('"object_1":')


@pytest.mark.scenario("R19.C1", on="pure")
def test_the_part_of_the_cut_token_that_the_model_wrote_is_not_supervised():
    """On the real vocabulary, one token ends a desc, the object and a line. Its desc part stays masked."""
    core = Core(table("qwen"))
    fused = core.table.pieces.index(b')"},\n')
    shape = coords(box(850, 850, 950, 950))
    ids = [*encode('{"object_1": {"bbox_2d": ' + shape + ', "desc": "ghost (x', core.table), fused]
    correction = correct(PROMPT, ids, [CUP], table=core.table, order="desc_first", settings=core.settings)
    parsed, segment = correction.parsed, correction.segment
    assert (parsed.remainder, len(parsed.valid)) == (b')"}', 1)
    tail = segment.prompt_length + len(parsed.prefix_ids)
    written = [
        (core.table.pieces[id], Role(role))
        for id, role in zip(segment.ids[tail:], segment.roles[tail:], strict=True)
    ]
    assert written[0] == (b')"', Role.masked_prefix)
    assert written[1] == (b"},", Role.tail_structure)
