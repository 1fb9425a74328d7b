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


def break_loss(run):
    run.steps[1]["loss"] = float("nan")


def break_counter(run):
    run.steps[1]["rollout/answers"] = 5.0


def break_weight(run):
    run.tensors["weight"][2] = float("nan")


def break_optimizer(run):
    run.tensors["0.exp_avg_sq"][1] *= 1.01


def break_stream(run):
    run.stream[0]["taken"] = 17


def repeat_step(run):
    run.steps.append(dict(run.steps[1]))


def lose_step(run):
    del run.steps[1]


CHANGES = {
    break_loss: "step 2: the loss is nan",
    break_counter: "step 2: other counters",
    break_weight: "tensors of the last checkpoint differ: ['weight']",
    break_optimizer: "tensors of the last checkpoint differ: ['0.exp_avg_sq']",
    break_stream: "another place of the stream",
    repeat_step: "not each there once",
    lose_step: "steps without a line: [2]",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_differs_is_named(outcome, change):
    disturbed = copy.deepcopy(outcome)
    change(disturbed)
    problems, _ = disturbed.differences(outcome, may_lack_lines=False)
    assert len(problems) == 1 and CHANGES[change] in problems[0]


def test_the_faults_of_a_seed_are_the_same_every_time(chaos):
    def draw(seed):
        faults = chaos.draw_faults(random.Random(seed), can_fill=True)
        return [next(faults) for _ in range(40)]

    assert draw("1 0") == draw("1 0") != draw("2 0")
    assert {fault.kind for fault in draw("1 0") + draw("2 0")} == {
        *("kill", "stop", "terminate", "delay", "drop", "truncate", "corrupt", "disk", "checkpoint")
    }
