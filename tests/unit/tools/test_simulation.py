"""The simulation of many GPUs (`benchmarks/scale.py`), at a small size."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "benchmarks/scale.py"
specification = importlib.util.spec_from_file_location("scale_simulation", FILE)  # tools has a scale.py too
scale = sys.modules["scale_simulation"] = importlib.util.module_from_spec(specification)
specification.loader.exec_module(scale)
Constants, Setup, simulate = scale.Constants, scale.Setup, scale.simulate

SMALL = Setup((1, 2), ranks=2, batch=2, accumulation=3, decode_batch_size=2, max_staleness=0)
pytestmark = pytest.mark.timeout(60)


def run(**changes):
    constants = Constants(**changes.pop("constants", {}))
    return simulate(replace(SMALL, **changes), constants, steps=10)


def test_overlap_hides_the_shorter_part_and_has_the_staleness_of_its_bound():
    in_turn, ahead = run(), run(max_staleness=1)
    assert (in_turn.staleness, ahead.staleness) == (0.0, 1.0)
    assert ahead.step_seconds < in_turn.step_seconds
    assert in_turn.learner_busy < ahead.learner_busy <= 1
    parts = in_turn.waited + in_turn.step_seconds * in_turn.learner_busy + in_turn.sync
    assert parts == pytest.approx(in_turn.step_seconds, rel=0.02), (
        "waiting, training and sending are the whole step"
    )


def test_servers_that_fail_cost_time_and_no_sample():
    calm, failing = run(), run(constants={"failure": 20.0, "absence": 5.0})
    assert failing.failures > 3 and calm.failures == 0
    assert failing.step_seconds > calm.step_seconds
    assert failing.samples_per_second * failing.step_seconds == pytest.approx(12, rel=0.01)


def test_two_senders_send_to_two_servers_in_the_time_of_one():
    one, two = run(), run(senders=2)
    constants = Constants()
    assert one.sync == pytest.approx(constants.sync_fixed + 2 * constants.weights / constants.network)
    assert two.sync == pytest.approx(constants.sync_fixed + constants.weights / constants.network)
