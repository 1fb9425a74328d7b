"""The text that is appended to an answer and the prefix that it continues (R19), clause by clause."""

import json

import numpy as np
import pytest

from coordexp.answers.correct import correct
from coordexp.answers.segment import Role, serialise
from coordexp.data import TrueObject
from tests.unit.answers.conftest import PROMPT, answer, box, entry, poly
from tests.vocabularies import table

CUP = TrueObject("red cup", box(10, 10, 110, 110))
ROOF = TrueObject("roof", poly(600, 600, 800, 600, 700, 700))
SMALL = table("small")
MORE = entry("object_9", "x", box(1, 1, 9, 9))


def fragment(after: bytes, *objects: TrueObject, first_number: int = 1) -> str:
    appended = serialise(objects, after=after, first_number=first_number, order="desc_first", table=SMALL)
    return appended.text.decode()


@pytest.mark.scenario("R19.C7", on="pure")
@pytest.mark.parametrize(
    ("after", "comma"),
    [
        (b"{", False),
        (b"{ \n\t", False),
        (b'{"object_1": {},', False),
        (b"}, \r\n", False),
        (b'{"object_1": {}', True),
        (b"}", True),
        (b"} \n", True),
    ],
)
def test_a_leading_comma_is_written_behind_a_closing_brace_and_nowhere_else(after, comma):
    assert fragment(after, CUP).startswith(', "object_1": {' if comma else '"object_1": {')


@pytest.mark.scenario("R19.C8", on="pure")
@pytest.mark.parametrize("after", [b"", b" ", b'"', b'{"object_1"', b"]", b":", b"5", b"<|coord_5|>", b"\xc3"])
@pytest.mark.parametrize("objects", [(), (CUP,)])
def test_a_prefix_that_is_not_append_ready_is_an_error(after, objects):
    with pytest.raises(ValueError, match="an answer can be continued only after"):
        fragment(after, *objects)


@pytest.mark.scenario("R19.C6", on="pure")
@pytest.mark.parametrize("objects", [(), (CUP,), (CUP, ROOF), (CUP, ROOF, CUP)])
def test_a_fragment_is_entries_without_an_outer_brace_and_one_brace_that_closes_the_answer(objects):
    text = fragment(b"{", *objects, first_number=4)
    assert not text.startswith("{")
    assert list(json.loads("{" + text)) == [f"object_{4 + k}" for k in range(len(objects))]
    assert text.endswith("}")
    with pytest.raises(json.JSONDecodeError, match="Expecting"):
        json.loads("{" + text[:-1])  # without its last brace the answer stays open


@pytest.mark.scenario("R19.C5", on="pure")
@pytest.mark.parametrize("text", ["", "no idea", "[]", '"object_1": {}', "Sure: {}", "}", "<|coord_5|>"])
def test_without_an_opening_brace_the_prefix_is_one_brace_and_all_truth_is_appended(core, text):
    parsed, match, segment = core.build(text, [CUP, ROOF])
    assert (parsed.prefix_ids, parsed.remainder, parsed.fallback) == ((), b"{", True)
    assert core.answer(segment) == answer(
        entry("object_1", "red cup", CUP.geometry), entry("object_2", "roof", ROOF.geometry)
    )
    assert match.missed == (0, 1)
    assert not {Role.masked_prefix, Role.matched_coord} & set(segment.roles.tolist())


@pytest.mark.scenario("R19.C5", on="pure")
@pytest.mark.parametrize("space", ["\n", " ", "\r\n\t  "])
def test_white_space_before_the_opening_brace_is_kept_and_makes_no_fallback(core, space):
    parsed, match, segment = core.build(space + answer(entry("object_1", "red cup", CUP.geometry)), [CUP, ROOF])
    assert (parsed.fallback, match.pairs) == (False, ((0, 0),))
    assert core.answer(segment) == space + answer(
        entry("object_1", "red cup", CUP.geometry), entry("object_2", "roof", ROOF.geometry)
    )


def spell_out(text: str, core) -> list[int]:
    """Return ids that no tokenizer writes for this text: one per byte, and coordinates as their tokens."""
    return [
        id
        for run in text.split("~")
        for id in (
            core.table.encode(run.encode())
            if run[:2] == "<|"
            else [core.table.byte_ids[byte] for byte in run.encode()]
        )
    ]


@pytest.mark.scenario("R19.C2", "R24.C1", "R25.C3", on="pure")
def test_no_token_before_the_cut_is_changed_whatever_the_tokenisation_and_layout(core):
    """Odd white space, keys out of order, and single bytes for which the tokenizer has longer tokens are all
    kept."""
    coords = " , ".join(f'"~<|coord_{bin}|>~"' for bin in CUP.geometry.bins)
    text = '{\n\t"object_7" :{ "bbox_2d":[' + coords + '],"desc":  "red cup" } ,\n "object_2": {"desc": "x"}\n}'
    ids = spell_out(text, core)
    assert core.table.encode(text.replace("~", "").encode()) != ids
    correction = correct(PROMPT, ids, [CUP, ROOF], table=core.table, order="desc_first", settings=core.settings)
    kept = ids[: len(ids) - 2]  # all but the line break and the closing brace
    assert correction.segment.ids[len(PROMPT) :][: len(kept)].tolist() == kept
    assert [prediction.key for prediction in correction.parsed.objects] == ["object_7", "object_2"]
    assert core.answer(correction.segment) == (
        text.replace("~", "")[:-2] + ", " + entry("object_8", "roof", ROOF.geometry) + "}"
    )


@pytest.mark.scenario("R19.C3", on="pure")
@pytest.mark.parametrize("behind", ["", "\n", answer(MORE), MORE + "}", ", " + MORE + "}", "<|im_end|>"])
def test_the_end_of_turn_and_everything_behind_it_are_removed(core, behind):
    """The answer ends at the first end of turn, closed or not, and the segment has a new end of turn."""
    first = entry("object_1", "red cup", CUP.geometry)
    for text in (answer(first), "{" + first, "{" + first + ", "):
        ids = [*core.table.encode(text.encode()), core.table.end_of_turn, *core.table.encode(behind.encode())]
        correction = correct(
            PROMPT, ids, [CUP, ROOF], table=core.table, order="desc_first", settings=core.settings
        )
        assert list(core.objects(correction.segment)) == ["object_1", "object_2"]
        assert np.flatnonzero(correction.segment.ids == core.table.end_of_turn).tolist() == [
            len(correction.segment) - 1
        ]
