"""The comparison of a disturbed run with an undisturbed one (`benchmarks/chaos.py`), without processes."""

import copy
import random
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow  # it imports what starts servers
FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def chaos():
    sys.path.insert(0, str(FOLDER))
    import chaos

    yield chaos
    sys.path.remove(str(FOLDER))


@pytest.fixture
def outcome(chaos):
    steps = [{"step": step, "loss": 2.0 / step, "rollout/answers": 6.0} for step in (1, 2, 3)]
    tensors = {"weight": torch.ones(4), "0.exp_avg_sq": torch.full((4,), 2e-7)}
    return chaos.Outcome(steps, tensors, [{"taken": 18}])


def test_the_same_run_has_no_differences(outcome):
    assert outcome.differences(copy.deepcopy(outcome), may_lack_lines=False) == ([], 0.0)


CHANGES = {
    "step 2: the loss is nan": lambda run: run.steps[1].update(loss=float("nan")),
    "step 2: other counters": lambda run: run.steps[1].update({"rollout/answers": 5.0}),
    "tensors of the last checkpoint differ: ['weight']": lambda run: run.tensors["weight"].fill_(float("nan")),
    "tensors of the last checkpoint differ: ['0.exp_avg_sq']": lambda run: run.tensors["0.exp_avg_sq"].mul_(1.01),
    "another place of the stream": lambda run: run.stream[0].update(taken=17),
    "not each there once": lambda run: run.steps.append(dict(run.steps[1])),
    "steps without a line: [2]": lambda run: run.steps.pop(1),
}


@pytest.mark.parametrize("problem", CHANGES)
def test_whatever_differs_is_named(outcome, problem):
    disturbed = copy.deepcopy(outcome)
    CHANGES[problem](disturbed)
    problems, _ = disturbed.differences(outcome, may_lack_lines=False)
    assert len(problems) == 1 and problem in problems[0]


def test_the_faults_of_a_seed_are_the_same_every_time(chaos):
    def draw(seed):
        faults = chaos.draw_faults(random.Random(seed), can_fill=True)
        return [next(faults) for _ in range(40)]

    assert draw("1 0") == draw("1 0") != draw("2 0")
    assert {fault.kind for fault in draw("1 0") + draw("2 0")} == {
        *("kill", "stop", "terminate", "delay", "drop", "truncate", "disk", "checkpoint")
    }
