"""How a rollout server calls its vLLM engine, which has one replica or several. vLLM is a fake here."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordexp.config import RolloutMatching
from coordexp.errors import EngineError
from coordexp.rollout.start import EngineSetup
from coordexp.servers.engine import ServedEngine, batch_arguments, check_devices
from coordexp.servers.processes import has_ended
from coordexp.servers.protocol import Refusal
from tests.vocabularies import table


class FakeCore:
    """vLLM's client of two replicas with one worker each, which return these results."""

    def __init__(self, *results: Any) -> None:
        self.results, self.calls = results, []

    async def call_utility_all_async(self, *call: Any) -> list[list[Any]]:
        self.calls.append(call)
        return [[result] for result in self.results]


def engine_of(core: FakeCore) -> ServedEngine:
    engine = object.__new__(ServedEngine)
    engine.vllm = SimpleNamespace(engine_core=core)
    return engine


@pytest.mark.scenario("R07.C9", on="fake")
@pytest.mark.parametrize("results", [(["out of memory", ""], None), (None, ["out of memory", ""])])
def test_an_update_that_fails_in_one_replica_fails(results):
    with pytest.raises(EngineError, match="out of memory"):
        asyncio.run(engine_of(FakeCore(*results)).load([], 0))


def test_every_replica_has_made_answers_with_log_probabilities_before_the_engine_is_ready(monkeypatch):
    engine, asked = engine_of(FakeCore(None, None)), []

    async def render(prompt: Any) -> Any:
        return prompt

    async def answer(prompt: Any, sampling: dict[str, Any], id: str, replica: int) -> None:
        asked.append((replica, sampling["n"], sampling["logprobs"]))

    engine.setup = SimpleNamespace(replicas=2)
    monkeypatch.setattr(engine, "render", render)
    monkeypatch.setattr(engine, "answer", answer)
    asyncio.run(engine.ready())
    assert engine.vllm.engine_core.calls == [("collective_rpc", "coordexp_is_ready", None, (), None)]
    assert asked == [(0, 1, 0), (0, 2, 0), (1, 1, 0), (1, 2, 0)]


class DeadCore(FakeCore):
    """vLLM's client of an engine whose worker has died: it refuses calls before the engine's process ends."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.resources = SimpleNamespace(engine_dead=False, engine_manager=SimpleNamespace(processes=[]))
        self.resources.coordinator = None
        self.ends = ends

    async def call_utility_all_async(self, *call: Any) -> list[list[Any]]:
        asyncio.get_running_loop().call_later(0.2, setattr, self.resources, "engine_dead", self.ends)
        raise RuntimeError("Call to collective_rpc method failed: collective_rpc should not be called on follower")


def dying(ends: bool) -> ServedEngine:
    engine = engine_of(DeadCore(ends))
    engine.vllm.errored = False
    return engine


def test_an_engine_that_ends_during_a_call_is_reported_as_ended(monkeypatch):
    monkeypatch.setattr("coordexp.servers.engine.ENDING", 1.0)
    with pytest.raises(Refusal) as refusal:
        asyncio.run(dying(ends=True).leave())
    assert (refusal.value.status, refusal.value.code) == (503, "engine_ended")
    assert "follower" not in refusal.value.problem and "leave" in refusal.value.problem
    with pytest.raises(EngineError, match=r"^collective_rpc should not be called on follower"):
        asyncio.run(dying(ends=False).leave())


def setup(device: str, **vllm: Any) -> EngineSetup:
    settings = RolloutMatching(vllm={"mode": "server", **vllm})
    return EngineSetup(Path("model"), "float32", settings, table("small"), torch.device(device))


@pytest.mark.scenario("R15.C1", on="fake")
def test_the_world_size_counts_the_devices_of_all_replicas():
    assert setup("cpu").world_size == 1
    assert setup("cpu", tensor_parallel_size=2, data_parallel_size=3).world_size == 6
    assert setup("cpu", tensor_parallel_size=2, data_parallel_size=3).size == 2


@pytest.mark.parametrize(
    ("batch", "devices", "longest", "tokens"),
    [(64, 1, 16000, 8192), (1, 1, 4096, 4096), (2, 2, 1000, 4000), (10000, 1, 16000, 10000)],
)
def test_a_server_on_gpus_computes_more_tokens_at_once_than_vllm_would(batch, devices, longest, tokens):
    """Not more than its sequences can have, and at least one for each of them, as vLLM requires."""
    vllm = {"mode": "server", "tensor_parallel_size": devices, "max_model_len": longest}
    settings = RolloutMatching(decode_batch_size=batch, vllm=vllm)
    here = EngineSetup(Path("model"), "float32", settings, table("small"), torch.device("cuda"))
    assert batch_arguments(here) == {"max_num_batched_tokens": tokens}
    assert batch_arguments(replace(here, device=torch.device("cpu"))) == {}


def test_too_few_gpus_for_the_replicas_are_an_error_before_vllm_is_started():
    with pytest.raises(EngineError) as error:
        check_devices(setup("cuda", data_parallel_size=3), 2)
    assert "data_parallel_size 3 is 3 GPUs, but this server sees 2" in error.value.problem
    assert error.value.fix.startswith("give it 3 GPUs")
    check_devices(setup("cuda", data_parallel_size=3), 3)
    check_devices(setup("cpu", data_parallel_size=3), 0)


@pytest.mark.parametrize("dead", ["nothing", "a replica", "the coordinator"])
def test_an_engine_has_ended_when_one_of_its_processes_has(dead):
    def process(name: str) -> Any:
        return SimpleNamespace(is_alive=lambda: name != dead)

    core = SimpleNamespace(
        resources=SimpleNamespace(
            engine_dead=False,
            engine_manager=SimpleNamespace(processes=[process("the first replica"), process("a replica")]),
            coordinator=SimpleNamespace(proc=process("the coordinator")),
        )
    )
    assert has_ended(core) == (dead != "nothing")
