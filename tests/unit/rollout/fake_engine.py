"""A colocated backend with a fake engine, to observe how and in which order the backend uses it."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordexp.config.rollout import RolloutMatching
from coordexp.rollout import colocate
from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout
from coordexp.rollout.start import EngineSetup

IMAGE = ImageRef("image.png", 64, 64)
CONFIG = {"r": 2}
ADAPTER = {"q.lora_A.weight": torch.ones(2, 8), "q.lora_B.weight": torch.ones(8, 2)}
WEIGHTS = {"q.weight": torch.ones(8, 8)}


class FakeLearner:
    """Always gives the same answer, as the fake engine does."""

    def generate(self, requests: Sequence[Request], version: int = 0) -> list[Rollout]:
        return [Rollout((1,), (2, 3), "text", (-0.5, -0.5), "stop", version) for _ in requests]


class FakeUpdates:
    """Records the names of the weights that it gets, and refuses adapters with the reason `Run.refusal`."""

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.lora_request: str | None = None
        self.wake = self.sleep = lambda: None

    def load(self, weights: Any, version: int) -> None:
        self.run.see("whole weights")
        self.run.sent.append((version, [name for name, _ in weights()]))
        self.lora_request = None

    def load_adapter(self, adapter: Any, version: int) -> str:
        config, tensors = adapter()
        assert config == CONFIG
        self.run.see("adapter")
        if not self.run.refusal:
            self.run.sent.append((version, [name for name, _ in tensors]))
            self.lora_request = f"adapter {version}"
        return self.run.refusal


class Run:
    """A run with a fake engine. `watch` is called with the name of each thing that is done to the engine.

    If `wrong_version` is set, the engine answers with this version."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        sync: dict[str, Any],
        has_adapter: bool = True,
        room: Callable[[], AbstractContextManager[None]] = nullcontext,
        watch: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.see = watch
        self.refusal = ""
        self.wrong_version: int | None = None
        self.sent: list[tuple[int, list[str]]] = []
        self.used: list[str | None] = []  # the adapter of each call
        self.started: list[bool] = []  # for each engine, whether it has room for adapters
        self.messages: list[str] = []
        self.recorded: list[dict[str, Any]] = []
        patch.setattr(colocate, "start_engine", self._fake_start)
        patch.setattr(colocate, "stop_engine", lambda engine: None)
        updates = SimpleNamespace(EngineUpdates=lambda *_: FakeUpdates(self))
        patch.setitem(sys.modules, "coordexp.rollout.update", updates)  # the real one imports vLLM
        patch.setattr(colocate, "generate_rollouts", self._fake_rollouts)
        settings = RolloutMatching.model_validate({"vllm": {"enable_lora": True, "sync": sync}})
        table: Any = None
        prompts: Any = None
        learner: Any = FakeLearner()
        self.backend = colocate.ColocateBackend(
            EngineSetup(Path("model"), "float32", settings, table, torch.device("cpu")),
            prompts,
            learner,
            [IMAGE],
            room,
            self.messages.append,
            (lambda: (CONFIG, iter(ADAPTER.items()))) if has_adapter else None,
            self.recorded.append,
        )

    @property
    def warnings(self) -> list[str]:
        return [message for message in self.messages if message.startswith("warning")]

    def step(self, version: int) -> list[Rollout]:
        with self.backend.session():
            self.backend.sync(lambda: iter(WEIGHTS.items()), version)
            return self.backend.generate([Request(IMAGE, Decode.greedy(4))])

    def _fake_start(self, setup: EngineSetup, adapters: bool) -> Any:
        self.see("start")
        self.started.append(adapters)
        return SimpleNamespace()

    def _fake_rollouts(self, engine: Any, prompts: Any, table: Any, requests: Any, lora_request: Any) -> Any:
        self.see("answers")
        self.used.append(lora_request)
        version = self.sent[-1][0] if self.wrong_version is None else self.wrong_version
        return FakeLearner().generate(requests, version)
