"""A colocated backend on a fake engine, to see in which order and with which decisions it is used."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordexp.config.rollout import RolloutMatching
from coordexp.rollout import colocate
from coordexp.rollout.adapter_fallback import AdapterRefused
from coordexp.rollout.backend import Decode, Picture, Request, Rollout
from coordexp.rollout.setup import Setup
from coordexp.train.spill import Away

PICTURE = Picture("picture.png", 64, 64)
CONFIG = {"r": 2}
ADAPTER = {"q.lora_A.weight": torch.ones(2, 8), "q.lora_B.weight": torch.ones(8, 2)}
WEIGHTS = {"q.weight": torch.ones(8, 8)}


class FakeLearner:
    """Answers always the same, as the fake engine does."""

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        return [Rollout((1,), (2, 3), "text", (-0.5, -0.5), "stop") for _ in requests]


class FakeConnection:
    """Keeps the names of what it is sent, and refuses adapters for the reason that `Run.refusal` gives."""

    def __init__(self, run: "Run") -> None:
        self.run = run
        self.lora_request: str | None = None

    def send(self, weights: Any, version: int, place: int) -> None:
        self.run.see("whole weights")
        self.run.sent.append((version, [name for name, _ in weights()]))
        self.lora_request = None

    def send_adapter(self, config: Any, tensors: Sequence[tuple[str, Any]], version: int) -> None:
        assert config == CONFIG
        self.run.see("adapter")
        if self.run.refusal:
            raise AdapterRefused(self.run.refusal)
        self.run.sent.append((version, [name for name, _ in tensors]))
        self.lora_request = f"adapter {version}"


class Run:
    """A run on a fake engine. `watch` is called with what is done to the engine, when it is done."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        sync: dict[str, Any],
        has_adapter: bool = True,
        room: Callable[[], AbstractContextManager[Any]] = lambda: nullcontext(Away()),
        watch: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.see = watch
        self.refusal = ""
        self.sent: list[tuple[int, list[str]]] = []
        self.used: list[str | None] = []  # adapters that answers were made with
        self.started: list[bool] = []  # whether with a place for adapters
        self.said: list[str] = []
        self.recorded: list[dict[str, Any]] = []
        patch.setattr(colocate, "start_engine", self._fake_start)
        patch.setattr(colocate, "Connection", lambda *_: FakeConnection(self))
        patch.setattr(colocate, "asked", lambda engine, work: work())
        patch.setattr(colocate, "answers", self._fake_answers)
        settings = RolloutMatching.model_validate({"vllm": {"enable_lora": True, "sync": sync}})
        table: Any = None
        prompts: Any = None
        learner: Any = FakeLearner()
        self.backend = colocate.ColocateBackend(
            Setup(Path("model"), "float32", settings, table, torch.device("cpu")),
            prompts,
            learner,
            PICTURE,
            room,
            self.said.append,
            (lambda: (CONFIG, iter(ADAPTER.items()))) if has_adapter else None,
            self.recorded.append,
        )

    @property
    def warnings(self) -> list[str]:
        return [said for said in self.said if said.startswith("warning")]

    def step(self, version: int) -> list[Rollout]:
        with self.backend.session():
            self.backend.sync(lambda: iter(WEIGHTS.items()), version)
            return self.backend.generate([Request(PICTURE, Decode.greedy(4))])

    def _fake_start(self, setup: Setup, adapters: bool) -> Any:
        self.see("start")
        self.started.append(adapters)
        return SimpleNamespace()

    def _fake_answers(self, engine: Any, prompts: Any, table: Any, requests: Any, lora_request: Any) -> Any:
        self.see("answers")
        self.used.append(lora_request)
        return FakeLearner().generate(requests)
