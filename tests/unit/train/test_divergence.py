"""When a run stops because a value is not finite, and its message."""

import math

import pytest
import torch
from torch import nn

from coordexp.train.stopping import (
    MAX_BROKEN_STEPS,
    MAX_SKIPPED_STEPS,
    DivergenceError,
    Health,
    StepNumbers,
    check_weights,
)

TERMS = {"token_ce/struct_ce": 1.0, "coord_reg/w1": 0.5}


def step(**changes) -> StepNumbers:
    return StepNumbers(**{"step": 7, "terms": TERMS, "grad_norm": 1.0, "broken_logits": 0} | changes)


def test_a_finite_step_changes_nothing():
    assert Health().after(step()) == Health()
    assert Health().after(step(grad_norm=None)) == Health()


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"terms": TERMS | {"coord_reg/w1": math.nan}}, "coord_reg/w1 is NaN"),
        ({"terms": TERMS | {"coord_reg/w1": -math.inf}}, "coord_reg/w1 is -Inf"),
        ({"terms": {"token_ce/eos_ce": math.inf}, "scaled": True}, "token_ce/eos_ce is Inf"),
        ({"grad_norm": math.nan}, "NaN"),
    ],
)
def test_a_value_that_is_not_finite_stops_the_run_at_once_and_is_named_with_the_step(changes, subject):
    with pytest.raises(DivergenceError, match=f"^step 7: .*{subject}") as caught:
        Health().after(step(**changes))
    assert caught.value.fix


def test_a_gradient_scaler_may_skip_some_steps_in_a_row_and_no_more():
    health = Health()
    for _ in range(MAX_SKIPPED_STEPS - 1):
        health = health.after(step(grad_norm=math.inf, scaled=True))
    assert health.after(step(scaled=True)) == Health()
    with pytest.raises(DivergenceError, match=f"Inf for {MAX_SKIPPED_STEPS} steps"):
        health.after(step(grad_norm=math.inf, scaled=True))


def test_logits_may_be_broken_for_some_steps_in_a_row_and_no_more():
    health = Health()
    for count in range(1, MAX_BROKEN_STEPS):
        health = health.after(step(broken_logits=3))
        assert health.broken_steps == count
    assert health.after(step()) == Health()
    with pytest.raises(DivergenceError, match=f"{MAX_BROKEN_STEPS} steps"):
        health.after(step(broken_logits=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_trained_weight_that_is_not_finite_is_named(value, dtype):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, dtype=dtype)))  # as a shard may be
    check_weights(model, 5)
    with torch.no_grad():
        model[1].bias[1] = value
    with pytest.raises(DivergenceError, match=r"^step 5: .*1\.bias"):
        check_weights(model, 5)
    model[1].bias.requires_grad_(False)
    check_weights(model, 5)
