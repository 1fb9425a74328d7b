"""From the dump of an answer that a correction policy rebuilt, or that was chosen among several, to what the page
shows."""

import json

import pytest

from coordexp.pages.rollout_sample import CUT, show_sample, summarise_sample
from coordexp.train.encode import StepIndex
from tests.dumped import CUP, DOG, NEAR_CUP, NEAR_ROOF, SCRIPT, SMALL, dumping
from tests.scripted import Said
from tests.unit.answers.conftest import answer, box, entry

AGAIN, LAMP = box(15, 12, 113, 109), box(850, 0, 950, 100)
IN_ORDER = {"insertion": "reading_order"}
POLICIES = (
    IN_ORDER,
    {"duplicates": "remove"},
    {"duplicates": "remove", "extras": "remove", "supervise": "matched"},
    {"duplicates": "remove", "insertion": "in_order", "supervise": "matched_with_desc"},
)
DOG_IS_MISSED = -2 - 1  # the owner of its tokens: the dog is the second true object


def written(*objects):
    """Return an answer with these pairs of desc and geometry."""
    return Said(answer(*(entry(f"object_{n}", *pair) for n, pair in enumerate(objects, 1))))


ROOF_CUP_CUP_LAMP = written(("roof", NEAR_ROOF), ("cup", NEAR_CUP), ("cup", AGAIN), ("lamp", LAMP))
CUP_CUP_ROOF = written(("cup", NEAR_CUP), ("cup", AGAIN), ("roof", NEAR_ROOF))


def dump(folder, said, **settings):
    """Return the dumped example of an answer, or of several, to the image with a cup, a dog and a roof."""
    step, _ = dumping(folder, script={"partly.png": said}, **settings)
    step([0], StepIndex(0, 0))
    (line,) = (folder / "dumps/step-000000.jsonl").read_text().splitlines()
    return json.loads(line)


def show(dumped, trained=None):
    return show_sample(dumped, trained, SMALL, desc_is_masked=False)


def text_of(sample, owner, *, cut):
    """Return the text of an object, as it was written or as it stands in the corrected answer."""
    tokens = zip(*(sample["tokens"][name] for name in ("ids", "owner", "roles")), strict=True)
    return SMALL.text_of([id for id, own, role in tokens if own == owner and (role == CUT) == cut])


@pytest.mark.parametrize("correction", POLICIES, ids=str)
@pytest.mark.parametrize("said", [ROOF_CUP_CUP_LAMP, CUP_CUP_ROOF, *SCRIPT.values()])
def test_the_coordinates_of_an_object_have_the_targets_of_its_true_object(tmp_path, said, correction):
    sample = show(dump(tmp_path, said, correction=correction))
    targets = {}
    for target, owner in zip(sample["tokens"]["target"], sample["tokens"]["owner"], strict=True):
        if target is not None:
            targets.setdefault(owner, []).append(target)
    truth = [obj for obj in sample["objects"] if obj["group"] == "True"]
    for shown, true in zip(truth, (CUP, DOG), strict=False):  # targets of a polygon are means over its vertices
        assert targets[shown["owner"]] == list(true.geometry.bins)
    assert len(targets) == 3


def test_an_object_in_the_wrong_place_is_shown_where_it_was_and_where_it_is_now(tmp_path):
    sample = show(dump(tmp_path, ROOF_CUP_CUP_LAMP, correction=IN_ORDER))
    assert text_of(sample, 0, cut=True).strip("{").startswith('"object_1": {"desc": "roof"')
    assert text_of(sample, 0, cut=False).startswith(', "object_5": {"desc": "roof"')
    words = [obj["words"] for obj in sample["objects"]]
    assert sample["objects"][0]["mark"] == "1 → 5" and words[0].endswith("moved: object_1 → object_5")
    assert words[2] == "matches no true object, moved: object_3 → object_3" and words[3].endswith("now object_1")
    assert words[5] == "added as object_4"


def test_what_is_left_out_says_why(tmp_path):
    correction = {"duplicates": "remove", "extras": "remove", "insertion": "in_order"}
    dumped = dump(tmp_path, ROOF_CUP_CUP_LAMP, correction=correction)
    objects = show(dumped)["objects"][:4]
    assert [obj["state"] for obj in objects] == ["matched", "matched", "duplicate", "removed"]
    assert [obj["mark"] for obj in objects] == ["1 → 3", "", "duplicate", "removed"]
    entry = summarise_sample(dumped, None)
    assert entry["extra"] == 2
    assert text_of(show(dumped), 2, cut=False) == ""


# Several rollouts

UNION = {
    "rollouts_per_sample": 3,
    "decoding": {"temperature": 0.7},
    "choice": {"rule": "union", "pseudo_labels": True},
    "correction": IN_ORDER,
}
LAMPS = [written(("lamp", LAMP)), CUP_CUP_ROOF, written(("cup", NEAR_CUP), ("lamp", box(852, 0, 950, 100)))]


def test_an_object_that_several_answers_agree_on_is_shown_with_its_tokens_and_number(tmp_path):
    dumped = dump(tmp_path, LAMPS, **UNION)
    sample = show(dumped)
    lamp = sample["objects"][-1]
    assert (lamp["desc"], lamp["bins"], lamp["mark"]) == ("lamp", [851, 0, 950, 100], "→ 1")
    owner = -2 - 3  # behind the three true objects
    assert (lamp["owner"], lamp["state"]) == (owner, "agreed")
    assert '"object_1": {"desc": "lamp"' in text_of(sample, owner, cut=False)


def test_an_extra_that_other_answers_have_too_is_marked_if_that_keeps_or_teaches_it(tmp_path):
    for changes, marks in (
        ({"choice": {"rule": "union", "pseudo_labels": True}}, [False, True]),
        ({"choice": {"rule": "union"}, "correction": IN_ORDER | {"extras": "remove"}}, [False, True]),
        ({"choice": {"rule": "union"}}, [False, False]),
    ):
        (tmp_path / "dumps/step-000000.jsonl").unlink(missing_ok=True)
        sample = show(dump(tmp_path, [LAMPS[2], LAMPS[0], Said("{}")], **UNION | changes))
        predicted = [obj["words"] for obj in sample["objects"] if obj["group"] == "Predicted"]
        assert ["other answers have it" in words for words in predicted] == marks
