"""From a dumped example to what the page shows of it."""

import json

import pytest

from coordexp.correction import Role
from coordexp.inspector.sample import CUT, MASKED_DESC, shown, summary
from tests.dumped import SMALL, dump_of

TRACE = {"format": 1, "example": 0, "step": 1, "loss": 2.5, "terms": {"token_ce/struct_ce": 2.5}}


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """By the name of the picture: partly right, garbage, and cut off."""
    file = dump_of(tmp_path_factory.mktemp("run"))
    wholes = [json.loads(line) for line in file.read_text().splitlines()]
    return {whole["picture"]["path"].rpartition("/")[2]: whole for whole in wholes}


def texts(sample, owner):
    tokens = sample["tokens"]
    ids = [id for id, whose in zip(tokens["ids"], tokens["owner"], strict=True) if whose == owner]
    return SMALL.text_of(ids)


def roles_text(sample, role):
    tokens = sample["tokens"]
    return SMALL.text_of([id for id, own in zip(tokens["ids"], tokens["roles"], strict=True) if own == role])


def test_without_what_was_cut_off_the_strip_is_the_answer_that_is_trained(dumped):
    for whole in dumped.values():
        tokens = shown(whole, None, SMALL, desc_is_masked=False)["tokens"]
        kept = [id for id, role in zip(tokens["ids"], tokens["roles"], strict=True) if role != CUT]
        assert kept == whole["result"]["streams"]["ids"][whole["result"]["prompt_length"] :]
        assert {len(values) for name, values in tokens.items() if name != "breaks"} == {len(tokens["ids"])}


def test_what_was_cut_off_stands_where_it_stood_in_the_answer(dumped):
    for whole in dumped.values():
        tokens = shown(whole, None, SMALL, desc_is_masked=False)["tokens"]
        answer = whole["rollout"]["ids"]
        assert tokens["ids"][: len(answer)] == answer
        cut = len(answer) - whole["result"]["prefix_tokens"]
        assert tokens["roles"].count(CUT) == cut
        assert tokens["roles"][len(answer) - cut : len(answer)] == [CUT] * cut


def test_tokens_belong_to_the_object_that_they_write(dumped):
    sample = shown(dumped["partly.png"], None, SMALL, desc_is_masked=False)
    assert texts(sample, 0).startswith('{"object_1": {"desc": "cup"')
    assert texts(sample, 1).strip(' ",').startswith('object_2": {"desc": "roof", "poly"')
    missed = texts(sample, -2 - 1)  # the dog is the second true object
    assert missed.strip(' ",').startswith('object_4": {"desc": "dog"') and "<|coord_300|>" in missed
    assert [one["by"] for one in sample["truth"]] == [0, None, 1]
    assert [one["of"] for one in sample["objects"]] == [0, 2, None]


def test_the_coordinates_of_an_object_carry_its_targets(dumped):
    sample = shown(dumped["partly.png"], None, SMALL, desc_is_masked=False)
    tokens = sample["tokens"]
    found = {}
    for target, whose in zip(tokens["target"], tokens["owner"], strict=True):
        if target is not None:
            found.setdefault(whose, []).append(target)
    assert found[0] == [10, 10, 110, 110]
    assert found[-3] == [300, 300, 500, 500]
    assert set(found) == {0, 1, -3}  # the extra object has none


def test_a_lost_object_and_its_reason_are_shown_with_its_tokens_in_the_cut(dumped):
    sample = shown(dumped["cut.png"], None, SMALL, desc_is_masked=False)
    lost = sample["objects"][1]
    assert (lost["reason"], lost["words"]) == ("truncated", "the answer ends inside of it")
    assert "dog" in texts(sample, 1)
    assert "dog" in roles_text(sample, CUT)
    assert any("stops before it is closed" in note for note in sample["notes"])


def test_an_answer_that_cannot_be_read_is_all_cut_off(dumped):
    sample = shown(dumped["garbage.png"], None, SMALL, desc_is_masked=False)
    assert "I see" in roles_text(sample, CUT)
    assert any("set aside" in note for note in sample["notes"])
    assert summary(dumped["garbage.png"], None)["fallback"]


def test_lines_begin_at_entries_at_the_cut_and_at_what_was_appended(dumped):
    sample = shown(dumped["partly.png"], None, SMALL, desc_is_masked=False)
    tokens, breaks = sample["tokens"], sample["tokens"]["breaks"]
    assert breaks == sorted(set(breaks)) and breaks[0] == 0
    starts = {tokens["owner"][at] for at in breaks}
    assert {0, 1, 2, -3} <= starts
    assert tokens["roles"].index(CUT) in breaks


def test_class_names_that_the_objective_leaves_out_have_a_role_of_their_own(dumped):
    masked = shown(dumped["partly.png"], None, SMALL, desc_is_masked=True)
    taught = shown(dumped["partly.png"], None, SMALL, desc_is_masked=False)
    assert roles_text(masked, MASKED_DESC) == roles_text(taught, Role.tail_desc) == "dog"
    assert roles_text(masked, Role.tail_desc) == ""


def test_a_trace_stands_at_the_tokens_that_it_is_of(dumped):
    whole = dumped["partly.png"]
    roles = whole["result"]["streams"]["roles"]
    where = [k for k, role in enumerate(roles) if role >= Role.matched_coord]
    coords = {str(k): [[k, 10000]] for k in where if roles[k] in (Role.matched_coord, Role.tail_coord)}
    trace = TRACE | {"where": where, "nll": [float(k) for k in where], "mass": [0.5] * len(where), "bins": coords}
    sample = shown(whole, trace, SMALL, desc_is_masked=False)
    tokens, trained = sample["tokens"], sample["trained"]
    assert list(trained["nll"]) == [k for k, role in enumerate(tokens["roles"]) if 2 <= role <= 6]
    assert list(trained["bins"]) == [k for k, role in enumerate(tokens["roles"]) if role in (2, 5)]
    ids = whole["result"]["streams"]["ids"]
    assert all(tokens["ids"][at] == ids[int(position)] for at, position in trained["nll"].items())
    assert summary(whole, trace)["loss"] == 2.5


def test_the_matrix_has_a_row_for_each_valid_object(dumped):
    match = shown(dumped["partly.png"], None, SMALL, desc_is_masked=False)["match"]
    assert match["rows"] == [0, 1, 2]
    assert [len(row) for row in match["iou"]] == [3, 3, 3]
    assert match["iou"][0][0] > 0.9


def test_counts_are_those_of_the_step(dumped):
    found = summary(dumped["partly.png"], None)
    assert (found["step"], found["true"], found["matched"], found["missed"], found["extra"]) == (1, 3, 2, 1, 1)
    cut = summary(dumped["cut.png"], None)
    assert (cut["truncated"], cut["finish"], cut["invalid"]) == (True, "length", 1)
