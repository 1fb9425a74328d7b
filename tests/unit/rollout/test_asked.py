"""Asking an engine never waits longer than the engine lives, nor than a deadline."""

import threading
import time
from types import SimpleNamespace

import pytest

from coordexp.errors import EngineError
from coordexp.rollout.connection import Connection, asked

ENDED = "the vLLM engine has ended\n  what it printed above may say why"


class Process:
    def __init__(self, seconds: float = 1e9) -> None:
        self.until = time.monotonic() + seconds

    def is_alive(self) -> bool:
        return time.monotonic() < self.until


def engine(process: Process):
    manager = SimpleNamespace(processes=[process])
    resources = SimpleNamespace(engine_dead=False, engine_manager=manager, coordinator=None)
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(resources=resources)))


@pytest.fixture
def never():
    """Waits until the test is over."""
    over = threading.Event()
    yield over.wait
    over.set()


def test_an_answer_comes_back_at_once():
    began = time.monotonic()
    assert asked(engine(Process()), lambda: "answer") == "answer"
    assert time.monotonic() - began < 0.1


def test_an_engine_that_ends_while_it_is_asked_is_an_error_within_a_second(never):
    began = time.monotonic()
    with pytest.raises(EngineError, match=ENDED) as error:
        asked(engine(Process(0.3)), never)
    assert time.monotonic() - began < 1.3
    assert "--resume goes on from the last checkpoint" in str(error.value)


def test_an_error_by_which_vllm_says_that_its_engine_ended_is_told_in_our_words():
    def fail() -> None:
        raise RuntimeError("EngineCore encountered an issue. See stack trace (above) for the root cause.")

    with pytest.raises(EngineError, match=ENDED):
        asked(engine(Process(0)), fail)


def test_another_error_passes_as_it_is():
    with pytest.raises(KeyError, match="mine"):
        asked(engine(Process()), lambda: {}["mine"])


def test_a_sync_that_hangs_ends_at_its_deadline_and_names_the_setting(never):
    connection = Connection(engine(Process()), device=None, timeout=0.3)
    connection._until = time.monotonic() + 0.3
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"took longer than 0.3 s\n.*raise rollout_matching.vllm.sync.timeout_s"):
        connection._call(never)
    assert time.monotonic() - began < 1.3
