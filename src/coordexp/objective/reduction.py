"""Sums and counts over the micro-steps and ranks of one optimizer step (D19).

The denominators are known from the data before the first backward, so each micro-step's loss is already its exact
share of the step's loss: gradients add up, whatever the packing, the accumulation or the number of ranks, and
clipping the accumulated gradient clips the gradient of the step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from coordexp.correction import Kind
from coordexp.objective.modules import Measure
from coordexp.objective.pipeline import BROKEN, Objective


def reduced_counts(counts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The counts of all micro-steps of this rank, added up over the ranks. One small collective a step,
    on `device`, where the backend wants it."""
    total = sum(counts, torch.zeros(len(Kind), dtype=torch.int64))
    if dist.is_initialized():
        total = total.to(device)
        dist.all_reduce(total)
    return total.cpu()


def gradient_scale() -> float:
    """What a micro-step's share is multiplied with before `backward`: DDP and FSDP take the mean over ranks."""
    return float(dist.get_world_size()) if dist.is_initialized() else 1.0


class Tally:
    """What the terms come to over one optimizer step or several, for reports."""

    def __init__(self, objective: Objective) -> None:
        self._terms = {term.name: term for term in objective.terms}
        self._names = (*self._terms, BROKEN)
        self._sums: Tensor | None = None  # a row a name: share of the step, sum, count
        self._step: Tensor | None = None  # the sums of the current optimizer step

    def add(self, measures: dict[str, Measure], counts: Tensor) -> None:
        """A row's measures, with the counts of the optimizer step that it belongs to."""
        parts = []
        for name in self._names:
            measure, term = measures[name], self._terms.get(name)
            total = measure.sum.detach().double()
            parts.append(
                torch.stack((total / (term.denominator(counts) if term else 1), total, measure.count.double()))
            )
        found = torch.stack(parts)
        self._sums = found if self._sums is None else self._sums + found
        self._step = found[:, 1] if self._step is None else self._step + found[:, 1]

    def end_step(self, grad_norm: Tensor | float | None) -> tuple[dict[str, float], int, float | None]:
        """Return each loss term's sum over the optimizer step, the number of broken logits, and the gradient norm.
        All are over all ranks: what is not finite on one of them is not finite here. To be called on all ranks
        once per step; it costs one collective and one copy from the device."""
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
        found = dict(zip(self._names, sums, strict=True))
        terms = {name: found[name] for name, term in self._terms.items() if term.weight is not None}
        return terms, int(found[BROKEN]), None if grad_norm is None else total_norm / ranks

    def report(self, steps: int = 1) -> dict[str, float]:
        """On every rank the same, as means over `steps`: `loss`, each term as it enters the loss before its
        weight, and as a mean over the positions it was computed at (`.../mean`). Diagnostics are such means. To be
        called on all ranks; it starts anew."""
        sums = self._sums if self._sums is not None else torch.zeros(len(self._names), 3, dtype=torch.float64)
        self._sums = None
        if dist.is_initialized():
            dist.all_reduce(sums)
        found = {"loss": 0.0}
        for name, (share, total, count) in zip(self._names, sums.tolist(), strict=True):
            term, mean = self._terms.get(name), total / max(count, 1.0)
            if term is None or term.weight is None:
                found[name] = mean
                continue
            found["loss"] += term.weight * share / steps
            found |= {name: share / steps, f"{name}/mean": mean}
        return found
