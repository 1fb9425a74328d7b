"""Messages while a user waits."""

import time
from functools import partial

from coordexp.rollout import colocate
from coordexp.tasks import remind
from tests.unit.rollout.fake_engine import Run


def test_a_message_is_repeated_with_its_seconds_until_the_work_ends():
    messages: list[str] = []
    with remind(messages.append, "waiting for vLLM", interval=0.05):
        assert messages == []
        until = time.monotonic() + 20
        while len(messages) < 2 and time.monotonic() < until:
            time.sleep(0.01)
    assert messages[:2] == ["waiting for vLLM (0 s)", "waiting for vLLM (0 s)"]
    time.sleep(0.2)
    count = len(messages)
    time.sleep(0.3)
    assert len(messages) == count


def test_a_run_that_waits_for_its_engine_says_so(monkeypatch):
    run = Run(monkeypatch, {}, has_adapter=False, watch=lambda what: time.sleep(0.5 if what == "start" else 0))
    monkeypatch.setattr(colocate, "remind", partial(remind, interval=0.05))
    run.step(1)
    first, second, *_, last = run.messages
    assert first.startswith("starting vLLM") and second == "waiting for vLLM (0 s)"
    assert last == "the engine answers as the learner does"
