"""A colocated engine that sleeps while the learner trains (`rollout_matching.vllm.sleep`). The engine is a fake
that fails if it is used in the wrong order; the backend, the updates and the state of the memory are real."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordexp.config.rollout import RolloutMatching
from coordexp.errors import EngineError
from coordexp.rollout import colocate
from coordexp.rollout.backend import Decode, Request
from coordexp.rollout.start import EngineSetup, start_engine
from tests.unit.rollout.fake_engine import ADAPTER, CONFIG, IMAGE, WEIGHTS, FakeLearner, Run

TAGS = {"weights", "kv_cache"}
WAKE = ["wake weights", "load", "wake kv_cache", "clear"]


class FakeSleepingEngine:
    """Behaves like vLLM's `LLM` with sleep mode. A level-2 sleep loses what a wake-up does not restore."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.asleep: set[str] = set()
        self.has_clean_cache = self.has_scratch_tensors = True
        self.version = ""
        self.llm_engine = SimpleNamespace(
            has_unfinished_requests=lambda: False,
            reset_prefix_cache=lambda: True,
            reset_mm_cache=lambda: None,
            reset_encoder_cache=lambda: None,
            set_weight_version=lambda version: setattr(self, "version", version),
            vllm_config=None,
            model_executor=SimpleNamespace(
                driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=self))
            ),
        )
        self.kv_caches = self.lora_manager = None  # of the model runner

    def sleep(self, level: int) -> None:
        assert not self.asleep, "it sleeps already, at least in part"
        self.events.append("sleep")
        self.asleep, self.has_clean_cache = set(TAGS), False
        self.has_scratch_tensors &= level == 1

    def wake_up(self, tags: list[str]) -> None:
        assert self.asleep >= set(tags), f"{tags} are awake"
        self.events += [f"wake {tag}" for tag in tags]
        self.asleep -= set(tags)

    def load(self, weights: Any) -> None:
        assert "weights" not in self.asleep, "the memory of the weights is not there"
        self.events.append("load")

    def clear_kv_caches(self, caches: None) -> None:
        assert "kv_cache" not in self.asleep, "the memory of the KV cache is not there"
        if not self.has_clean_cache:
            self.events.append("clear")
        self.has_clean_cache = True

    def replace_adapter(self, manager: None, adapter: None) -> None:
        assert not self.asleep, "an adapter is loaded into an engine that sleeps"
        self.events.append("adapter")

    def generate(self) -> None:
        assert not self.asleep, f"{self.asleep} sleep"
        assert self.has_clean_cache, "the KV cache has unknown contents"
        assert self.has_scratch_tensors, "tensors beside the weights were dropped"
        self.events.append("answers")


class SleepingRun:
    """A run with the fake engine. `events` are what is done to the engine, and where the learner is."""

    def __init__(self, patch: pytest.MonkeyPatch, *, adapter: bool = False, **vllm: Any) -> None:
        from coordexp.rollout import update  # imports vLLM

        self.events: list[str] = []
        self.engine = FakeSleepingEngine(self.events)
        patch.setattr(colocate, "start_engine", lambda setup, adapters: self.engine)
        patch.setattr(colocate, "generate_rollouts", self._fake_rollouts)
        patch.setattr(update, "load_all", lambda runner, weights: runner.load(weights))
        patch.setattr(update, "set_current_vllm_config", nullcontext)
        patch.setattr(update, "clear_kv_caches", self.engine.clear_kv_caches)
        patch.setattr(update, "build_adapter", lambda *given: None)
        patch.setattr(update, "replace_adapter", self.engine.replace_adapter)
        vllm = {"sleep": True, "sync": {"mode": "adapter" if adapter else "full"}, "enable_lora": adapter} | vllm
        settings = RolloutMatching.model_validate({"vllm": vllm})
        table: Any = None
        learner: Any = FakeLearner()
        self.backend = colocate.ColocateBackend(
            EngineSetup(Path("model"), "float32", settings, table, torch.device("cpu")),
            table,
            learner,
            [IMAGE],
            self._room,
            adapter=(lambda: (CONFIG, iter(ADAPTER.items()))) if adapter else None,
        )

    @contextmanager
    def _room(self) -> Iterator[None]:
        self.events.append("learner out")
        yield
        assert not self.backend.setup.settings.vllm.sleep or self.engine.asleep == TAGS, "no memory to return to"
        self.events.append("learner back")

    def sync(self, version: int) -> None:
        self.backend.sync(lambda: iter(WEIGHTS.items()), version)

    def generate(self) -> None:
        self.backend.generate([Request(IMAGE, Decode.greedy(4))])

    def step(self, version: int) -> list[str]:
        """Return the events of a session with a sync and rollouts."""
        self.events.clear()
        with self.backend.session():
            self.sync(version)
            self.generate()
        return list(self.events)

    def _fake_rollouts(self, engine: Any, prompts: Any, table: Any, requests: Any, lora_request: Any) -> Any:
        engine.generate()
        return FakeLearner().generate(requests, int(engine.version))


@pytest.mark.slow
def test_an_engine_sleeps_from_the_last_rollout_of_a_step_until_the_next_sync(monkeypatch):
    run = SleepingRun(monkeypatch)
    assert run.step(1) == ["learner out", "load", "answers", "answers", "sleep", "learner back"]  # with a canary
    for version in (2, 3):
        assert run.step(version) == ["learner out", *WAKE, "answers", "sleep", "learner back"]


@pytest.mark.slow
def test_an_evaluation_at_the_version_of_the_engine_wakes_it_without_a_sync(monkeypatch):
    run = SleepingRun(monkeypatch)
    run.step(1)
    assert run.step(1) == [
        "learner out",
        "wake weights",
        "wake kv_cache",
        "clear",
        "answers",
        "sleep",
        "learner back",
    ]
    assert run.step(2) == ["learner out", *WAKE, "answers", "sleep", "learner back"]


@pytest.mark.slow
def test_an_adapter_goes_to_an_engine_that_still_has_its_base_weights(monkeypatch):
    run = SleepingRun(monkeypatch, adapter=True)
    assert run.step(1) == ["learner out", "adapter", "answers", "answers", "sleep", "learner back"]
    awake = ["wake weights", "wake kv_cache", "clear"]
    assert run.step(2) == ["learner out", *awake, "adapter", "answers", "sleep", "learner back"]


@pytest.mark.slow
def test_after_an_error_the_engine_is_not_asked_to_sleep(monkeypatch):
    run = SleepingRun(monkeypatch)

    def fail() -> None:
        raise RuntimeError("the engine broke")

    monkeypatch.setattr(run.engine, "generate", fail)
    with pytest.raises(RuntimeError, match="the engine broke"), run.backend.session():
        run.sync(1)
    assert "sleep" not in run.events


def test_an_engine_on_a_cpu_cannot_sleep():
    settings = RolloutMatching.model_validate({"vllm": {"sleep": True}})
    table: Any = None
    with pytest.raises(EngineError, match=r"vllm\.sleep: only an engine on a GPU can sleep"):
        start_engine(EngineSetup(Path("model"), "float32", settings, table, torch.device("cpu")))


def test_torch_returns_unused_memory_before_an_engine_on_the_same_gpu_is_used(monkeypatch):
    events: list[str] = []
    run = Run(monkeypatch, {"mode": "full"}, watch=events.append)
    run.backend.setup = replace(run.backend.setup, device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("return memory"))
    run.step(1)
    run.step(2)
    first = ["return memory", "start", "whole weights", "return memory", "answers", "answers"]
    assert events == [*first, "return memory", "whole weights", "return memory", "answers"]
