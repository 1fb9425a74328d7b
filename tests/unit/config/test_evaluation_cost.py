"""The line that says what an evaluation costs."""

import pytest

from coordexp.config.settings import describe_evaluation
from tests.unit.config.trees import load, stage1, stage2

EVALUATES = {
    "custom__val_jsonl": "val.jsonl",
    "training__eval_strategy": "steps",
    "training__eval_steps": 200,
}


def describe(tree, records=5000):
    return describe_evaluation(load(tree).settings, records)


def test_a_hint_says_what_to_change_if_images_are_answered_one_at_a_time():
    line, hint = describe(stage2(**EVALUATES)).splitlines()
    assert line == "evaluation: 5,000 images, 1 at a time, up to 2,048 tokens each, every 200 steps"
    assert "rollout_matching.decode_batch_size" in hint and "custom.eval_samples" in hint


def test_the_line_of_stage_1_says_that_vllm_does_not_answer():
    tree = stage1(**EVALUATES, rollout_matching={"decode_batch_size": 16, "max_new_tokens": 512})
    assert describe(tree) == (
        "evaluation: 5,000 images, 16 at a time on each device, up to 512 tokens each, every 200 steps, answered "
        "with transformers (rollout_backend: vllm has no effect in stage1_sft)"
    )


@pytest.mark.parametrize(
    ("records", "limit", "words"),
    [
        (5000, 300, "evaluation: 300 of 5,000 images,"),
        (200, 300, "evaluation: 200 images,"),
        (1, None, "evaluation: 1 image,"),
        (None, None, "evaluation: all held-out images,"),
        (None, 300, "evaluation: 300 of all held-out images,"),
    ],
)
def test_the_number_of_images_is_what_will_be_answered(records, limit, words):
    assert describe(stage2(**EVALUATES, custom__eval_samples=limit), records).startswith(words)


def test_evaluation_follows_logging_steps_if_eval_steps_is_unset():
    assert "every 500 steps" in describe(stage2(**EVALUATES | {"training__eval_steps": None}))
    assert "every 0.1 of all steps" in describe(stage2(**EVALUATES | {"training__eval_steps": 0.1}))


def test_a_run_without_evaluation_has_no_line():
    assert describe(stage2()) is None
