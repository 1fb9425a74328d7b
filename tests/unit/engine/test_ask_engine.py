"""A call to an engine never waits longer than the engine lives, nor longer than a deadline."""

import threading
import time
from types import SimpleNamespace

import pytest

from coordexp.engine.send import EngineConnection, ask_engine
from coordexp.errors import EngineError

ENDED = "the vLLM engine has ended\n  vLLM's output above may say why"


class FakeProcess:
    """A process that lives for some seconds."""

    def __init__(self, seconds: float = 1e9) -> None:
        self.end = time.monotonic() + seconds

    def is_alive(self) -> bool:
        return time.monotonic() < self.end


def engine(process: FakeProcess):
    manager = SimpleNamespace(processes=[process])
    resources = SimpleNamespace(engine_dead=False, engine_manager=manager, coordinator=None)
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(resources=resources)))


@pytest.fixture
def never():
    """A function that returns only when the test is over."""
    over = threading.Event()
    yield over.wait
    over.set()


def test_an_answer_comes_back_at_once():
    began = time.monotonic()
    assert ask_engine(engine(FakeProcess()), lambda: "answer") == "answer"
    assert time.monotonic() - began < 0.1


def test_an_engine_that_ends_during_a_call_is_an_error_within_a_second(never):
    began = time.monotonic()
    with pytest.raises(EngineError, match=ENDED) as error:
        ask_engine(engine(FakeProcess(0.3)), never)
    assert time.monotonic() - began < 1.3
    assert "--resume continues from the last checkpoint" in str(error.value)


def test_vllms_own_error_about_an_engine_that_has_ended_is_replaced_by_ours():
    def fail() -> None:
        raise RuntimeError("EngineCore encountered an issue. See stack trace (above) for the root cause.")

    with pytest.raises(EngineError, match=ENDED):
        ask_engine(engine(FakeProcess(0)), fail)


def test_any_other_error_is_raised_unchanged():
    with pytest.raises(KeyError, match="mine"):
        ask_engine(engine(FakeProcess()), lambda: {}["mine"])


def test_a_sync_that_hangs_ends_at_its_deadline_and_names_the_setting(never):
    connection = EngineConnection(engine(FakeProcess()), device=None, timeout=0.3, memory=None)
    connection._deadline = time.monotonic() + 0.3
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"took longer than 0.3 s\n.*raise rollout_matching.vllm.sync.timeout_s"):
        connection._call(never)
    assert time.monotonic() - began < 1.3
