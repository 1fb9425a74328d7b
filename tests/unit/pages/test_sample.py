"""From a dumped example to what the page shows."""

import json

import pytest

from coordexp.answers.segment import Role
from coordexp.pages.rollout_sample import (
    CUT,
    MASKED_DESC,
    show_sample,
    summarise_sample,
)
from tests.dumped import SMALL, dump_of

TRACE = {"format": 1, "example": 0, "step": 1, "loss": 2.5, "terms": {"token_ce/struct_ce": 2.5}}


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """Dumped examples by the name of their image: partly right, garbage, and cut off."""
    file = dump_of(tmp_path_factory.mktemp("run"))
    dumps = [json.loads(line) for line in file.read_text().splitlines()]
    return {dump["picture"]["path"].rpartition("/")[2]: dump for dump in dumps}


def texts(sample, owner):
    tokens = sample["tokens"]
    ids = [id for id, token_owner in zip(tokens["ids"], tokens["owner"], strict=True) if token_owner == owner]
    return SMALL.text_of(ids)


def roles_text(sample, role):
    tokens = sample["tokens"]
    return SMALL.text_of([id for id, own in zip(tokens["ids"], tokens["roles"], strict=True) if own == role])


def test_tokens_belong_to_the_object_that_they_write(dumped):
    sample = show_sample(dumped["partly.png"], None, SMALL, desc_is_masked=False)
    assert texts(sample, 0).startswith('{"object_1": {"desc": "cup"')
    assert texts(sample, 1).strip(' ",').startswith('object_2": {"desc": "roof", "poly"')
    missed = texts(sample, -2 - 1)  # the dog is the second true object
    assert missed.strip(' ",').startswith('object_4": {"desc": "dog"') and "<|coord_300|>" in missed
    assert [(obj["key"], obj["owner"], obj["state"]) for obj in sample["objects"]] == [
        *(("object_1", 0, "matched"), ("object_2", 1, "matched"), ("object_3", 2, "extra")),
        *(("true 1", 0, "true"), ("true 2", -3, "missed"), ("true 3", 1, "true")),
    ]


def test_a_lost_object_and_its_reason_are_shown_with_its_tokens_in_the_cut(dumped):
    sample = show_sample(dumped["cut.png"], None, SMALL, desc_is_masked=False)
    lost = sample["objects"][1]
    assert (lost["state"], lost["words"]) == ("invalid", "the answer ends inside it")
    assert "dog" in texts(sample, 1)
    assert "dog" in roles_text(sample, CUT)
    assert any("stops before it is closed" in note for note in sample["notes"])


def test_an_answer_that_cannot_be_read_is_all_cut_off(dumped):
    sample = show_sample(dumped["garbage.png"], None, SMALL, desc_is_masked=False)
    assert "I see" in roles_text(sample, CUT)
    assert any("all of it is removed" in note for note in sample["notes"])


def test_lines_begin_at_entries_at_the_cut_and_at_what_was_appended(dumped):
    sample = show_sample(dumped["partly.png"], None, SMALL, desc_is_masked=False)
    tokens, lines = sample["tokens"], sample["lines"]
    assert [end for _, end, *_ in lines] == [*(start for start, *_ in lines[1:]), len(tokens["ids"])]
    labels = {owner: label.split()[0] for _, _, owner, label in lines if label}
    assert labels == {0: "matched", 1: "matched", 2: "extra", -3: "missed,"}
    assert tokens["roles"].index(CUT) in [start for start, *_ in lines]


def test_class_names_that_the_objective_leaves_out_have_a_role_of_their_own(dumped):
    masked = show_sample(dumped["partly.png"], None, SMALL, desc_is_masked=True)
    trained = show_sample(dumped["partly.png"], None, SMALL, desc_is_masked=False)
    assert roles_text(masked, MASKED_DESC) == roles_text(trained, Role.tail_desc) == "dog"
    assert roles_text(masked, Role.tail_desc) == ""


def test_a_trace_is_attached_to_its_tokens(dumped):
    dump = dumped["partly.png"]
    roles = dump["result"]["streams"]["roles"]
    where = [k for k, role in enumerate(roles) if role >= Role.matched_coord]
    coords = {str(k): [[k, 10000]] for k in where if roles[k] in (Role.matched_coord, Role.tail_coord)}
    trace = TRACE | {"where": where, "nll": [float(k) for k in where], "mass": [0.5] * len(where), "bins": coords}
    sample = show_sample(dump, trace, SMALL, desc_is_masked=False)
    tokens, trained = sample["tokens"], sample["trained"]
    assert list(trained["nll"]) == [k for k, role in enumerate(tokens["roles"]) if 2 <= role <= 6]
    assert list(trained["bins"]) == [k for k, role in enumerate(tokens["roles"]) if role in (2, 5)]
    ids = dump["result"]["streams"]["ids"]
    assert all(tokens["ids"][at] == ids[int(position)] for at, position in trained["nll"].items())
    assert summarise_sample(dump, trace)["loss"] == 2.5


def test_counts_are_those_of_the_step(dumped):
    entry = summarise_sample(dumped["partly.png"], None)
    assert (entry["step"], entry["true"], entry["matched"], entry["missed"], entry["extra"]) == (1, 3, 2, 1, 1)
    cut = summarise_sample(dumped["cut.png"], None)
    assert (cut["truncated"], cut["invalid"]) == (True, 1)


def test_matched_objects_with_another_name_are_counted(dumped):
    dump = json.loads(json.dumps(dumped["partly.png"]))
    assert summarise_sample(dump, None)["renamed"] == 0
    dump["truth"][0]["desc"] = "mug"
    dump["truth"][1]["desc"] = "cat"  # it is missed
    assert (summarise_sample(dump, None)["matched"], summarise_sample(dump, None)["renamed"]) == (2, 1)
