"""Outcomes that follow from answers and times alone, and that answers show which weights were not sent."""

import copy
import math

import pytest

from coordexp.doctor.machine import DoctorDeadlines, Machine
from coordexp.doctor.outcome import (
    Agreement,
    judge_detection,
    judge_guard,
    judge_health,
    judge_losses,
    judge_parity,
)
from coordexp.rollout.backend import Rollout


def answer(ids, logprobs=None, reason="length"):
    return Rollout((1,), tuple(ids), "text", tuple(logprobs or [-2.0] * len(ids)), reason)


def test_equal_answers_are_parity():
    own = [answer([5, 6]), answer([7, 8])]
    theirs = [answer([5, 6], [-2.0, -2.0005]), answer([7, 8])]
    outcome = judge_parity("parity", Agreement.of(own, theirs, "float32"), "advice")
    assert outcome.state == "ok"
    assert "0.0005" in outcome.measured


def test_another_probability_is_not_parity_and_the_fix_is_given():
    outcome = judge_parity("parity", Agreement.of([answer([5])], [answer([5], [-2.1])], "float32"), "do this")
    assert (outcome.state, outcome.fix) == ("failed", "do this") and "-2.0000" in outcome.problem


def test_close_choices_of_16_bits_are_parity_but_not_from_the_first_token_on():
    own = [answer(range(8))] * 4
    late = [answer([0, 1, 2, 3, 90, 91, 92, 93])] * 4
    assert judge_parity("parity", Agreement.of(own, late, "bfloat16"), "").state == "ok"
    early = [answer(range(90, 98))] * 4
    assert judge_parity("parity", Agreement.of(own, early, "bfloat16"), "").state == "failed"


def test_other_weights_that_the_probes_do_not_show_are_a_problem():
    seen = Agreement(1, 0, 8, 0, 0.0, ("token 0 is other",), "bfloat16")
    unseen = Agreement(1, 0, 8, 0, 0.0, (), "bfloat16")
    assert judge_detection("other", [seen] * 3 + [unseen] * 5).state == "ok"
    assert judge_detection("other", [unseen] * 2 + [seen] * 6).state == "failed"


def test_a_guard_must_end_looping_answers_but_none_that_it_is_switched_off_for():
    looping, free = answer([3] * 8, reason="repeat"), answer([3] * 64)
    states = [
        judge_guard("guard", guarded, unguarded, 64).state
        for guarded, unguarded in (([looping] * 2, [free]), ([looping, free], [free]), ([looping], [looping]))
    ]
    assert states == ["ok", "failed", "failed"]


def test_health_requests_must_be_quick_and_never_too_late():
    assert judge_health("health", [1.0, 2.0, 300.0]).state == "ok"
    assert judge_health("health", [150.0] * 3).state == "failed"
    assert judge_health("health", [1.0, 1.0, 2500.0]).state == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_answers_of_the_tiny_model_show_which_weights_it_has(tmp_path, dtype):
    """The checks rely on this: changed weights give other answers, restored weights the same ones, and the image
    that training looks at shows that weights became repetitive."""
    from coordexp.doctor.learner import TinyLearner, Workspace

    learner = TinyLearner(Workspace.make(tmp_path, Machine("cpu", dtype, DoctorDeadlines(1, 1, 1))))
    first = copy.copy(learner.own)
    model = copy.deepcopy(learner.model)
    first.model = lambda: model
    assert learner.compare(first).equal == 8
    learner.change(seed=1)
    assert not learner.compare(first).is_same
    learner.make_repetitive()
    assert learner.compare_by_image(first)[0].differences
    assert {len(set(rollout.ids)) for rollout in learner.own.generate(learner.requests())} == {1}
    learner.restore()
    assert learner.compare(first).equal == 8


@pytest.mark.parametrize(
    ("losses", "state"), [((7.2, 7.1), "ok"), ((7.2,), "failed"), ((7.2, math.nan), "failed")]
)
def test_a_run_must_have_a_finite_loss_for_every_step(losses, state):
    outcome = judge_losses("training", losses, 2, 12.0)
    assert outcome.state == state
