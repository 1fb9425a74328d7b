"""Rollouts that servers make while the learner trains (`stage2.max_staleness: 1`), with real engines and
processes: each step has rollouts of the weights before the last update, and no fault changes what is trained."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.integration.servers import Fleet
from tests.integration.stage2_runs import DRAWN, check_steps, started, steps, training
from tests.integration.test_server_faults import KILL, Learning, learning, proxied, through

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
STEPS = 8
AHEAD = DRAWN | {"stage2__max_staleness": 1, "training__max_steps": STEPS, "training__save_steps": 3}


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> Iterator[Learning]:
    fleet.ensure(2)
    with proxied(fleet, 2) as proxies, learning(through(fleet, proxies, "ahead", **AHEAD)) as learner:
        learner.wait_for_end(0, 240)
        yield learner


def test_each_step_has_rollouts_of_the_weights_before_the_last_update(undisturbed):
    lines = undisturbed.steps
    assert [line["rollout/staleness"] for line in lines] == [0] + [1] * (STEPS - 1)
    assert [event["version"] for event in undisturbed.events("sync")] == list(range(STEPS - 1))
    assert [event["version"] for event in undisturbed.events("rollouts")] == [0, *range(STEPS - 1)]


def test_a_learner_that_is_stopped_and_killed_with_rollouts_in_flight_goes_on_as_if_nothing_had_happened(
    fleet, undisturbed
):
    fleet.ensure(2)
    with proxied(fleet, 2) as proxies:
        file = through(fleet, proxies, "ahead-resumed", **AHEAD)
        with started(training(file)) as run:
            learner = Learning(run, file.with_suffix(""))
            learner.until(lambda: len(learner.steps) >= 1)
            os.kill(run.process.pid, signal.SIGTERM)
            stopped = learner.wait_for_end(0)
        (saved,) = learner.folder.glob("checkpoint-*")
        assert (saved / "rollouts_0.json").is_file(), stopped[-2000:]
        with learning(file, "--resume") as learner:
            learner.until(lambda: (learner.folder / "checkpoint-6" / "trainer_state.json").is_file())
            learner.until(lambda: len(steps(learner.folder)) >= 7)
            os.kill(learner.run.process.pid, KILL)
            learner.wait_for_end(-KILL)
        with learning(file, "--resume") as learner:
            assert "checkpoint-6" in learner.wait_for_end(0, 240)
            check_steps(learner.steps, undisturbed.steps)
