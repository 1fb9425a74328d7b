"""An engine in this process changes nothing for the rest of the process, and answers the same after its sleep."""

import gc
import logging
import os
import random
import signal
import threading
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoProcessor

from coordexp.answers.table import VocabularyTable
from coordexp.rollout.backend import Decode, ImageRef, Request
from coordexp.rollout.generate import VllmBackend
from coordexp.rollout.prompt import PromptBuilder
from coordexp.rollout.update import EngineUpdates
from tests.engines import QUESTION, drawing

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]


def state() -> dict[str, Any]:
    """Return what vLLM sets in a process of its own."""
    return {
        "environment": {name: value for name, value in os.environ.items() if "TORCHINDUCTOR" not in name},
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "logging": (logging.getLogger().level, list(logging.getLogger().handlers)),
        "threads": (torch.get_num_threads(), torch.set_num_threads),
        "precision": (torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.is_grad_enabled()),
        "frozen": gc.get_freeze_count(),
        "random": (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()),
        "children": {child.pid for child in psutil.Process().children()},
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of what differs. Children of earlier tests may end meanwhile."""
    after = after | {"children": after["children"] | before["children"]}
    return [name for name in before if before[name] != after[name]]


def ask(backend: VllmBackend, image: ImageRef, decode: Decode) -> list[tuple[int, ...]]:
    return [rollout.ids for rollout in backend.generate([Request(image, decode, seed=seed) for seed in (1, 2)])]


def check_sleep(backend: VllmBackend, image: ImageRef) -> None:
    """Check that vLLM answers the same after its sleep. On a CPU it goes through its states and frees nothing."""
    memory = EngineUpdates(backend.engine, sleeps=True)
    executor = backend.engine.llm_engine.model_executor
    expected = ask(backend, image, Decode.greedy(8))
    memory.sleep()
    assert executor.is_sleeping
    memory.wake_for_weights()
    assert executor.sleeping_tags == {"kv_cache"}
    memory.wake()
    assert not executor.is_sleeping
    assert ask(backend, image, Decode.greedy(8)) == expected


@pytest.fixture
def image(tmp_path) -> ImageRef:
    drawing().save(tmp_path / "image.png")
    return ImageRef(str(tmp_path / "image.png"), 128, 128)


def test_an_engine_changes_nothing_in_its_process_when_it_starts_and_when_it_answers(lively_model, image):
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    gc.unfreeze()
    before = state()
    table = VocabularyTable.from_folder(lively_model)
    prompts = PromptBuilder(AutoProcessor.from_pretrained(lively_model), QUESTION)
    backend = VllmBackend(lively_model, prompts, table, max_length=512)
    try:
        assert changes(before, state()) == []
        greedy, sampled = Decode.greedy(8), Decode(8, "sampling", temperature=1.0)
        answers = ask(backend, image, greedy), ask(backend, image, sampled)
        assert changes(before, state()) == []
        assert threading.current_thread() is threading.main_thread()
        assert (ask(backend, image, greedy), ask(backend, image, sampled)) == answers
        assert len({*answers[1]}) == 2
        check_sleep(backend, image)
    finally:
        backend.close()
    assert changes(before, state()) == []
