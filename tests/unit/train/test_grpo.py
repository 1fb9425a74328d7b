"""The reward of `tools/grpo.py`, and what TRL makes of it. Tests that need TRL are skipped where it is missing: it
is not part of the environment."""

import importlib.util
import json

import pytest

from coordexp.answers.formats import CoordTokenAnswers
from coordexp.data import Record, RecordFile
from coordexp.data.records import RecordObject
from coordexp.evaluate import evaluate
from coordexp.evaluate.answer import build_answer
from coordexp.rollout.backend import Rollout
from tests.vocabularies import encode, table

SPEC = importlib.util.spec_from_file_location("grpo", "tools/grpo.py")
grpo = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(grpo)

SMALL = table("small")
CUP, DOG = ("cup", (100, 100, 300, 300)), ("dog", (500, 500, 900, 900))
EXTRA = ("cup", (700, 0, 800, 90))
BESIDE = ("dog", (500, 500, 900, 680))  # overlaps DOG by less than half


def record(*objects):
    return Record("a.png", 64, 64, "bin", tuple(RecordObject(desc, "bbox_2d", bins) for desc, bins in objects))


def answer(*objects):
    entries = {
        f"object_{k}": {"desc": desc, "bbox_2d": [f"<|coord_{bin}|>" for bin in bins]}
        for k, (desc, bins) in enumerate(objects, start=1)
    }
    return json.dumps(entries)


def reward(text, *objects):
    return grpo.reward_answer(encode(text, SMALL), 1, record(*objects), SMALL)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (answer(CUP, DOG), 1.0),
        (answer(DOG, CUP), 1.0),
        (answer(CUP), 2 / 3),
        (answer(CUP, DOG, EXTRA), 4 / 5),
        (answer(CUP, CUP, DOG), 4 / 5),
        (answer(CUP, ("cat", DOG[1])), 1 / 2),
        (answer(CUP, DOG)[:-5], 2 / 3),  # cut off inside the second object
        ("{}", 0.0),
        ("cup", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_f1_of_the_valid_objects_with_class(text, expected):
    assert reward(text, CUP, DOG) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ((CUP, DOG, EXTRA), 1.0),  # the label of the extra may be missing
        ((CUP, EXTRA), 2 / 3),
        ((CUP, BESIDE), 2 / 3),
        ((EXTRA,), 0.0),
        ((CUP, CUP, DOG), 4 / 5),
        ((CUP, ("cat", DOG[1])), 1 / 2),
    ],
)
def test_a_reward_for_incomplete_labels_ignores_what_overlaps_no_label(objects, expected):
    ids = encode(answer(*objects), SMALL)
    reward = grpo.reward_answer(ids, 1, record(CUP, DOG), SMALL, ignore_unmatched=True)
    assert reward == pytest.approx(expected)


@pytest.mark.parametrize(("text", "expected"), [("{}", 1.0), (answer(CUP), 0.0), ("cup", 0.0), ("{", 0.0)])
def test_on_an_empty_image_only_a_complete_answer_without_objects_is_rewarded(text, expected):
    assert reward(text) == expected


@pytest.mark.parametrize("text", [answer(CUP), answer(CUP, DOG, EXTRA), answer(EXTRA), answer(CUP, DOG)[:-5]])
def test_the_reward_is_what_evaluation_reports_for_the_same_image(text):
    ids, truth = encode(text, SMALL), record(CUP, DOG)
    rollout = Rollout.of(SMALL, (), ids, [0.0] * len(ids), "stop")
    report = evaluate([(1, truth)], [build_answer(1, "a.png", rollout, CoordTokenAnswers(SMALL))])
    assert reward(text, CUP, DOG) == report.metrics()["f1_50"]


def test_tokens_are_counted_without_the_end_of_turn_and_the_count_goes_on(tmp_path):
    (tmp_path / "a.jsonl").write_text(record(CUP, DOG).as_json() + "\n")
    f1 = grpo.F1Reward(RecordFile(tmp_path / "a.jsonl"), SMALL)
    whole = encode(answer(CUP, DOG), SMALL)
    cut, logged = whole[:-3], {}
    for _ in range(2):
        rewards = f1.score([[*whole, SMALL.end_of_turn], cut], index=[0, 0], log_metric=logged.__setitem__)
    assert rewards == [1.0, pytest.approx(2 / 3)]
    assert logged["rollout/tokens"] == len(whole) + len(cut)
    assert logged["rollout/mean_tokens"] == (len(whole) + len(cut)) / 2
    assert logged["generated_tokens"] == 2 * (len(whole) + len(cut))
