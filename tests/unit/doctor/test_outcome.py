"""What counts as well, from answers and times alone; and that weights which were not sent are seen in answers."""

import copy

import pytest

from coordexp.doctor import outcome
from coordexp.doctor.machine import Deadlines, Machine
from coordexp.doctor.outcome import Agreement, Outcome
from coordexp.rollout.backend import Rollout


def answer(ids, logprobs=None, reason="length"):
    return Rollout((1,), tuple(ids), "text", tuple(logprobs or [-2.0] * len(ids)), reason)


def test_equal_answers_are_parity():
    own = [answer([5, 6]), answer([7, 8])]
    theirs = [answer([5, 6], [-2.0, -2.0005]), answer([7, 8])]
    found = outcome.parity("parity", Agreement.of(own, theirs, "float32"), "advice")
    assert found.state == "ok"
    assert "2 of 2 answers equal, 4 of 4 tokens, log probabilities within 0.0005 (allowed: 0.001)" in found.found


def test_another_probability_is_none_and_the_advice_is_told():
    found = outcome.parity("parity", Agreement.of([answer([5])], [answer([5], [-2.1])], "float32"), "do this")
    assert found.state == "failed"
    assert "token 0 is 5 with log probability -2.0000" in found.problem and found.problem.endswith("\n  do this")


def test_close_choices_of_16_bits_are_parity_but_not_from_the_first_token_on():
    own = [answer(range(8))] * 4
    late = [answer([0, 1, 2, 3, 90, 91, 92, 93])] * 4
    assert outcome.parity("parity", Agreement.of(own, late, "bfloat16"), "").state == "ok"
    early = [answer(range(90, 98))] * 4
    found = outcome.parity("parity", Agreement.of(own, early, "bfloat16"), "")
    assert "less than 25% of the tokens are the same" in found.problem


def test_other_weights_that_the_probe_does_not_show_are_a_problem():
    seen, unseen = (Agreement(1, 0, 8, 0, 0.0, told, "float32") for told in (("token 0 is other",), ()))
    assert outcome.noticed("other", 0, [seen, unseen]).found == "in 1 of 2 answers: token 0 is other"
    assert "cannot be relied on" in outcome.noticed("other", 1, [seen, unseen]).problem


def test_a_guard_must_end_loops_and_nothing_that_it_is_off_for():
    looping, free = answer([3] * 8, reason="repeat"), answer([3] * 64)
    assert outcome.guarded("guard", [looping] * 2, [free], 64).found.startswith("ended 2 of 2 looping answers")
    assert "did not end a looping answer" in outcome.guarded("guard", [looping, free], [free], 64).problem
    assert "switched off" in outcome.guarded("guard", [looping], [looping], 64).problem


def test_health_must_be_told_quickly_and_never_too_late():
    assert outcome.health("health", [1.0, 2.0, 300.0]).state == "ok"
    assert outcome.health("health", [150.0] * 3).state == "failed"
    assert outcome.health("health", [1.0, 1.0, 2500.0]).state == "failed"


def test_what_was_not_checked_is_neither_well_nor_a_problem():
    assert Outcome("x", "no GPU", checked=False).state == "not checked"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_answers_of_the_tiny_model_tell_its_weights_apart(tmp_path, dtype):
    """What the checks rest on: changed weights answer otherwise, restored ones the same, and the looping ones
    are noticed by the picture that training looks at."""
    from coordexp.doctor.learner import TinyLearner
    from coordexp.doctor.workplace import Workplace

    learner = TinyLearner(Workplace.make(tmp_path, Machine("cpu", dtype, Deadlines(1, 1, 1))))
    first = copy.copy(learner.own)
    model = copy.deepcopy(learner.model)
    first.model = lambda: model
    assert learner.agreement(first).equal == 8
    learner.change(seed=1)
    assert not learner.agreement(first).same
    learner.loop()
    assert learner.agreements(first)[0].told
    assert {len(set(one.ids)) for one in learner.own.generate(learner.requests())} == {1}
    learner.restore()
    assert learner.agreement(first).equal == 8
