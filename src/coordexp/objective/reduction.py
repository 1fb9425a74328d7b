"""Add up loss terms over the micro-steps and ranks of an optimizer step.

The denominators are known from the data before the first backward pass, so the loss of each micro-step is its
exact share of the loss of the step. Gradients therefore add up to the same sum, whatever the packing, the
accumulation or the number of ranks, and clipping the accumulated gradient clips the gradient of the whole step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from coordexp.correction import TokenKind
from coordexp.objective.modules import Measure
from coordexp.objective.pipeline import BROKEN, Objective


def reduce_counts(counts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the counts of all micro-steps on all ranks. This costs one small collective per step, on
    `device`, which the communication backend must support."""
    total = sum(counts, torch.zeros(len(TokenKind), dtype=torch.int64))
    if dist.is_initialized():
        total = total.to(device)
        dist.all_reduce(total)
    return total.cpu()


def gradient_scale() -> float:
    """Return the factor for the loss of a micro-step before `backward`. It makes up for DDP and FSDP, which
    average gradients over ranks instead of adding them."""
    return float(dist.get_world_size()) if dist.is_initialized() else 1.0


class LossTally:
    """The sums of all terms over one or more optimizer steps, for reports."""

    def __init__(self, objective: Objective) -> None:
        self._terms = {term.name: term for term in objective.terms}
        self._names = (*self._terms, BROKEN)
        self._sums: Tensor | None = None  # one row per name: share of the loss of the step, sum, count
        self._step: Tensor | None = None  # the sums of the current optimizer step

    def add(self, measures: dict[str, Measure], counts: Tensor) -> None:
        """Add the measures of a row. `counts` are those of the optimizer step that the row belongs to."""
        parts = []
        for name in self._names:
            measure, term = measures[name], self._terms.get(name)
            total = measure.sum.detach().double()
            parts.append(
                torch.stack((total / (term.denominator(counts) if term else 1), total, measure.count.double()))
            )
        row = torch.stack(parts)
        self._sums = row if self._sums is None else self._sums + row
        self._step = row[:, 1] if self._step is None else self._step + row[:, 1]

    def end_step(self, grad_norm: Tensor | float | None) -> tuple[dict[str, float], int, float | None]:
        """Return each loss term's sum over the optimizer step, the number of broken logits, and the gradient
        norm. Sums are over all ranks and the norm is their mean, so a value that is not finite on one rank is
        not finite here. Call this once per step on all ranks. It costs one collective and one copy from the
        device."""
        assert self._step is not None, "a step without a row"
        norm = 0.0 if grad_norm is None else grad_norm
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        numbers = torch.cat((self._step, torch.as_tensor(norm, device=self._step.device).double().reshape(1)))
        self._step = None
        ranks = 1
        if dist.is_initialized():
            dist.all_reduce(numbers)
            ranks = dist.get_world_size()
        *sums, total_norm = numbers.tolist()
        totals = dict(zip(self._names, sums, strict=True))
        terms = {name: totals[name] for name, term in self._terms.items() if term.weight is not None}
        return terms, int(totals[BROKEN]), None if grad_norm is None else total_norm / ranks

    def report(self, steps: int = 1) -> dict[str, float]:
        """Return the metrics since the last report, as means over `steps`, and start again from zero.

        They are `loss`, each term, normalised as in the loss but not yet weighted, and each term as a mean over
        the positions at which it was computed (`.../mean`). Diagnostics are means over positions. Call this on all
        ranks. All of them get the same result.
        """
        sums = self._sums if self._sums is not None else torch.zeros(len(self._names), 3, dtype=torch.float64)
        self._sums = None
        if dist.is_initialized():
            dist.all_reduce(sums)
        metrics = {"loss": 0.0}
        for name, (share, total, count) in zip(self._names, sums.tolist(), strict=True):
            term, mean = self._terms.get(name), total / max(count, 1.0)
            if term is None or term.weight is None:
                metrics[name] = mean
                continue
            metrics["loss"] += term.weight * share / steps
            metrics |= {name: share / steps, f"{name}/mean": mean}
        return metrics
