"""Settings of mixed data: names and prompts of data sets, held-out questions, and the loss of chat records."""

import pytest

from coordexp.config.rules import trains_chat
from tests.unit.config.trees import CHAT_CE, TOKEN_CE, load, only_problem, stage1, stage2

SETS = [{"path": "a.jsonl"}, {"path": "b.jsonl", "name": "questions"}]


def mixed(**changes):
    return stage1(**{"custom__train_jsonl": None, "custom__train_data": SETS} | changes)


def test_data_sets_are_named_by_their_place_unless_they_have_a_name():
    assert load(mixed()).settings.custom.set_names == ("set_0", "questions")
    assert load(stage1()).settings.custom.set_names == ()
    single = stage1(custom__train_jsonl=None, custom__train_data=SETS[1:])
    assert load(single).settings.custom.set_names == ()


@pytest.mark.parametrize("key", ["train_data", "eval_data"])
def test_two_data_sets_with_one_name_are_refused(key):
    sets = [{"path": "a.jsonl", "name": "set_1"}, {"path": "b.jsonl"}]
    tree = mixed(**{f"custom__{key}": sets})
    path, message = only_problem(tree)
    assert path == f"custom.{key}" and "two data sets are named set_1" in message


def test_a_name_must_be_usable_in_a_metric():
    path, _ = only_problem(mixed(custom__eval_data=[{"path": "q.jsonl", "name": "a/b"}]))
    assert path == "custom.eval_data[0].name"


def test_the_prompts_of_a_data_set_follow_the_rules_of_those_of_the_run():
    sets = [SETS[0], SETS[1] | {"class_prompt": "Find them."}]
    path, message = only_problem(mixed(custom__train_data=sets))
    assert path == "custom.train_data[1].class_prompt" and "{classes}" in message
    sets = [SETS[0] | {"prompt": "Detect all, {order}."}, SETS[1]]
    path, message = only_problem(mixed(custom__train_data=sets))
    assert path == "custom.train_data[0].prompt" and "{order} has no words" in message
    load(mixed(custom__train_data=sets, custom__object_order="reading"))


def test_questions_alone_are_enough_for_evaluation():
    evaluated = {"training__eval_strategy": "steps", "training__eval_steps": 5}
    path, message = only_problem(mixed(**evaluated))
    assert path == "custom.val_jsonl" and "custom.eval_data" in message
    settings = load(mixed(**evaluated, custom__eval_data=[{"path": "q.jsonl"}])).settings
    assert settings.evaluates_chat and not settings.evaluates


def test_chat_ce_needs_channel_a_and_no_channel_of_the_run():
    def with_module(**changes):
        return stage2(rollout_matching__pipeline={"objective": [TOKEN_CE, CHAT_CE | changes], "diagnostics": []})

    assert trains_chat(load(with_module()).settings)
    assert not trains_chat(load(with_module(channels=["B"])).settings)
    assert not trains_chat(load(with_module(enabled=False)).settings)
    assert not trains_chat(load(with_module(config={"answer_ce_weight": 0.0})).settings)
    assert not trains_chat(load(stage2()).settings)
