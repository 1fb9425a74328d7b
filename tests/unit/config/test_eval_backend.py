"""Which engine answers in the evaluation of Stage 1."""

import importlib.util

import pytest

from coordexp.config import World, parse_settings
from tests.unit.config.trees import load, stage1, stage2

EVALUATES = {
    "custom__val_jsonl": "val.jsonl",
    "training__eval_strategy": "steps",
    "training__eval_steps": 200,
}


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
