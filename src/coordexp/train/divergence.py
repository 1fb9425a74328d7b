"""Decide when a run must stop, and what must not be saved, because a value is NaN or infinite.

The decision is a pure function of numbers that are reduced over all ranks, so it is the same on every rank.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from coordexp.errors import UserError
from coordexp.objective.split import FENCE
from coordexp.ranks import gather_texts

# A diverged model has broken logits at every step. A single odd image may cause them at one.
MAX_BROKEN_STEPS = 5
# The gradient scaler of fp16 skips a step whose gradient overflows, and halves its scale, which starts at 65,536.
# After this many steps in a row the scale is below 1: the gradient itself overflows.
MAX_SKIPPED_STEPS = 20

WAY_OUT = (
    "lower training.learning_rate, lengthen training.warmup_steps or lower training.max_grad_norm; train in "
    "bfloat16 or float32 instead of float16; look at the data with `coordexp data doctor`. --resume keeps the "
    "learning rate of the checkpoint: to change it, start a new run with model.path at a checkpoint"
)


class DivergenceError(UserError):
    """A loss term, a gradient norm or a weight is not finite, or logits stay broken."""


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one optimizer step over all ranks. `step` is counted as in the log. `grad_norm` is None
    where it is not known. `scaled` is True if a gradient scaler skips steps whose gradient overflows."""

    step: int
    terms: Mapping[str, float]
    grad_norm: float | None
    broken_logits: int
    scaled: bool = False


@dataclass(frozen=True)
class Health:
    """How many of the latest steps, in a row, had broken logits, and how many the gradient scaler skipped."""

    broken_steps: int = 0
    skipped_steps: int = 0

    def after(self, numbers: StepNumbers, advice: str = "") -> "Health":
        """Return the health after this step. Raise DivergenceError, with `advice` in its fix, if the run must
        stop."""
        broken = self.broken_steps + 1 if numbers.broken_logits else 0
        overflows = numbers.grad_norm is not None and not math.isfinite(numbers.grad_norm)
        skipped = self.skipped_steps + 1 if overflows and numbers.scaled else 0
        problems = (
            _describe_terms(numbers),
            _describe_gradient(numbers, skipped) if overflows else "",
            _describe_broken_steps(broken),
        )
        if problem := next(filter(None, problems), None):
            logits = f" ({describe_broken(numbers.broken_logits)})" if numbers.broken_logits else ""
            fix = f"{WAY_OUT}. {advice}" if advice else WAY_OUT
            raise DivergenceError(f"step {numbers.step}: {problem}{logits}; the run stops", fix)
        return Health(broken, skipped)


def _describe_terms(numbers: StepNumbers) -> str:
    broken = [
        f"{name} is {_name_value(value)}" for name, value in numbers.terms.items() if not math.isfinite(value)
    ]
    return f"the loss is not finite: {', '.join(broken)}" if broken else ""


def _describe_gradient(numbers: StepNumbers, skipped: int) -> str:
    assert numbers.grad_norm is not None
    problem = f"the gradient norm is {_name_value(numbers.grad_norm)}"
    if not numbers.scaled:
        return problem
    return f"{problem} for {skipped} steps in a row" if skipped >= MAX_SKIPPED_STEPS else ""


def _describe_broken_steps(broken_steps: int) -> str:
    if broken_steps < MAX_BROKEN_STEPS:
        return ""
    return f"logits were broken in {broken_steps} steps in a row"


def describe_broken(count: int) -> str:
    """Return a text for this many broken logits."""
    return f"{count:,} logits were NaN, infinite or beyond +-{FENCE:,.0f}"


def _name_value(value: float) -> str:
    return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"


def check_weights(model: nn.Module, step: int) -> None:
    """Raise DivergenceError, on all ranks, if a trained weight is not finite on any of them. Each rank checks
    its own shard of a sharded weight. All results are copied from the device at once."""
    local = {name: _to_local(weight) for name, weight in model.named_parameters() if weight.requires_grad}
    names = [name for name, weight in local.items() if weight.numel()]
    # The largest absolute value is NaN if any is, and needs no memory of the weight's size.
    norms = [torch.linalg.vector_norm(local[name], math.inf).float() for name in names]
    finite = torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().tolist() if norms else []
    own = next((name for name, is_finite in zip(names, finite, strict=True) if not is_finite), "")
    if name := next(filter(None, gather_texts(own)), None):
        raise DivergenceError(
            f"step {step}: the weight {name} has NaN or infinite values after the update; it is not saved, and "
            "the run stops",
            WAY_OUT,
        )


def _to_local(weight: Tensor) -> Tensor:
    weight = getattr(weight, "ds_tensor", weight).detach()  # ZeRO stage 3 leaves the weight itself empty
    return weight.to_local() if isinstance(weight, DTensor) else weight
