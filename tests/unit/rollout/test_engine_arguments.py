"""The arguments that vLLM engines are started with, colocated and in a server. No engine is started."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coordexp.config.rollout import RepeatTerminate, RolloutMatching
from coordexp.rollout.backend import Decode
from coordexp.rollout.guard import ENGINE_GUARD, guard_arguments, key_pattern
from coordexp.rollout.start import EngineSetup, engine_arguments
from coordexp.servers.swift import TEXT
from tests.integration.servers import GUARD
from tests.vocabularies import table


def arguments(**settings: Any) -> dict[str, Any]:
    setup = EngineSetup(Path("model"), "float32", RolloutMatching(**settings), table("small"), torch.device("cpu"))
    return engine_arguments(setup)


@pytest.mark.scenario("R07.C3", on="pure")
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("gpu_memory_utilization", 0.31),
        ("tensor_parallel_size", 2),
        ("max_model_len", 321),
        ("enforce_eager", True),
    ],
)
def test_an_engine_is_configured_by_rollout_matching_vllm(setting: str, value: Any) -> None:
    assert arguments(vllm={setting: value})[setting] == value
    assert arguments()[setting] != value


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_batched_tokens", 4096), ("mm_processor_cache_gb", 0.5), ("kv_cache_dtype", "fp8")],
)
def test_further_arguments_are_passed_on_to_vllm_only_if_they_are_set(name: str, value: Any) -> None:
    assert arguments(vllm={"engine_args": {name: value}})[name] == value
    assert name not in arguments()


def test_vllm_has_no_default_for_the_tokens_of_a_step_of_an_engine_that_is_started_like_a_server() -> None:
    """The reason for `servers.engine.batch_arguments`."""
    from vllm import EngineArgs
    from vllm.config import SchedulerConfig
    from vllm.usage.usage_lib import UsageContext

    tokens, _ = EngineArgs.get_batch_defaults(1)
    assert UsageContext.ENGINE_CONTEXT not in tokens and SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS == 2048
    assert tokens[UsageContext.LLM_CLASS] > 2048


def test_limits_on_the_pixels_of_an_image_are_passed_on_if_they_are_not_those_of_the_folder() -> None:
    size = {"shortest_edge": 256, "longest_edge": 4096}
    setup = EngineSetup(Path("model"), "float32", RolloutMatching(), table("small"), torch.device("cpu"))
    for is_set, expected in ((True, {"images_kwargs": {"size": size}}), (False, None)):
        given = engine_arguments(replace(setup, image_size=size, has_image_limits=is_set))
        assert given["mm_processor_kwargs"] == expected


@pytest.mark.scenario("R10.C6", "R10.S2", on="pure")
@pytest.mark.parametrize(("batch", "devices"), [(1, 1), (5, 1), (5, 3)])
def test_an_engine_may_compute_decode_batch_size_sequences_for_each_of_its_devices(
    batch: int, devices: int
) -> None:
    """The same arguments go to an engine beside the learner and to one in a server."""
    given = arguments(decode_batch_size=batch, vllm={"tensor_parallel_size": devices})
    assert given["tensor_parallel_size"] == devices
    assert given["max_num_seqs"] == batch * devices


@pytest.mark.scenario("R33.S4", "R34.C1", on="pure")
def test_guard_settings_in_the_environment_of_a_server_have_no_effect_on_a_colocated_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the learner's own settings decide whether a colocated engine has the guard (D33)."""
    monkeypatch.setenv(TEXT, RepeatTerminate(**GUARD).model_dump_json())
    vocabulary = table("small")
    for guard, processors in ((RepeatTerminate(), None), (RepeatTerminate(**GUARD), [ENGINE_GUARD])):
        assert arguments(repeat_terminate=guard)["logits_processors"] == processors
        decode = Decode.of(RolloutMatching(repeat_terminate=guard))
        sent = guard_arguments(decode.guard, key_pattern(vocabulary), vocabulary.end_of_turn)
        assert bool(sent) == guard.enabled


@pytest.mark.parametrize(
    ("engine", "learner", "coarsest"),
    [
        ("float32", "", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("float16", "bfloat16", "bfloat16"),
    ],
)
def test_answers_are_compared_in_the_least_exact_data_type_of_the_two(engine, learner, coarsest):
    setup = EngineSetup(Path("model"), engine, RolloutMatching(), table("small"), torch.device("cpu"), learner)
    assert setup.coarsest_dtype == coarsest
