"""The line that says what an evaluation costs."""

import importlib.util

import pytest

from coordexp.cli.check import describe_evaluation
from coordexp.config import World, parse_settings
from tests.unit.config.trees import load, stage1, stage2

EVALUATES = {
    "custom__val_jsonl": "val.jsonl",
    "training__eval_strategy": "steps",
    "training__eval_steps": 200,
}


def describe(tree, records=5000):
    return describe_evaluation(load(tree).settings, records)


def test_a_hint_says_what_to_change_if_images_are_answered_one_at_a_time():
    line, hint = describe(stage2(**EVALUATES))
    assert line == "evaluation: 5,000 images, 1 at a time, up to 2,048 tokens each, every 200 steps"
    assert "rollout_matching.decode_batch_size" in hint and "custom.eval_samples" in hint


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("hf", "transformers (stage1.eval_backend: vllm would use vLLM, and GPU memory for it)"),
        ("auto", "transformers (stage1.eval_backend: vllm would use vLLM, and GPU memory for it)"),
        ("vllm", "vLLM"),
    ],
)
def test_the_line_of_stage_1_says_what_answers(backend, words):
    rollout = {"decode_batch_size": 16, "max_new_tokens": 512}
    tree = stage1(**EVALUATES, stage1__eval_backend=backend, rollout_matching=rollout)
    assert describe(tree) == [
        "evaluation: 5,000 images, 16 at a time on each device, up to 512 tokens each, every 200 steps, answered "
        f"with {words}"
    ]


def test_only_an_evaluation_in_stage_1_starts_the_engine_of_its_eval_backend():
    vllm = {"stage1__eval_backend": "vllm"}
    assert load(stage1(**EVALUATES, **vllm)).settings.backend == "vllm"
    for tree in (stage1(**vllm), stage2(rollout_matching__rollout_backend="hf", **EVALUATES, **vllm)):
        assert load(tree).settings.backend == "hf"


@pytest.mark.parametrize(
    ("vllm", "is_installed", "backend", "reason"),
    [
        (None, True, "hf", "rollout_matching.vllm describes no engine"),
        ({}, True, "hf", "rollout_matching.vllm describes no engine"),
        ({"gpu_memory_utilization": 0.3}, True, "vllm", "vLLM is installed"),
        ({"gpu_memory_utilization": 0.3}, False, "hf", "vLLM is not installed"),
    ],
)
def test_without_a_choice_vllm_answers_where_the_config_gives_an_engine_its_memory(
    monkeypatch, vllm, is_installed, backend, reason
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if is_installed else None)
    loaded = load(stage1(**EVALUATES, rollout_matching={} if vllm is None else {"vllm": vllm}))
    assert loaded.settings.backend == loaded.settings.stage1.eval_backend == backend
    assert loaded.origins["stage1.eval_backend"] == f"derived: auto, and {reason}"
    again = parse_settings(loaded.settings.model_dump(mode="json"), World(1)).settings
    assert again.backend == backend


def test_a_run_that_does_not_evaluate_in_stage_1_starts_no_engine():
    loaded = load(stage1(rollout_matching={"vllm": {"gpu_memory_utilization": 0.3}}))
    assert loaded.settings.backend == "hf"


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
    assert describe(stage2(**EVALUATES, custom__eval_samples=limit), records)[0].startswith(words)


def test_evaluation_follows_logging_steps_if_eval_steps_is_unset():
    assert "every 500 steps" in describe(stage2(**EVALUATES | {"training__eval_steps": None}))[0]
    assert "every 0.1 of all steps" in describe(stage2(**EVALUATES | {"training__eval_steps": 0.1}))[0]


def test_a_run_without_evaluation_has_no_line():
    assert describe(stage2()) == []
