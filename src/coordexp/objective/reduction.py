"""Sums and counts over the micro-steps and ranks of one optimizer step (D19).

The denominators are known from the data before the first backward, so each micro-step's loss is already its exact
share of the step's loss: gradients add up, whatever the packing, the accumulation or the number of ranks, and
clipping the accumulated gradient clips the gradient of the step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from coordexp.objective.modules import Measure
from coordexp.objective.pipeline import Objective


def reduced_counts(counts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The counts of all micro-steps of this rank, added up over the ranks. One small collective a step,
    on `device`, where the backend wants it."""
    total = torch.stack(list(counts)).sum(0)
    if dist.is_initialized():
        total = total.to(device)
        dist.all_reduce(total)
    return total.cpu()


def gradient_scale(divided_by: int = 1) -> float:
    """What a micro-step's share is multiplied with before `backward`, because DDP and FSDP take the mean over
    ranks, and a loop may divide by its number of micro-steps (`divided_by`)."""
    return float((dist.get_world_size() if dist.is_initialized() else 1) * divided_by)


class Tally:
    """What the terms came to over an optimizer step, for reports."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._names: tuple[str, ...] = ()
        self._sums: Tensor | None = None

    def add(self, measures: dict[str, Measure]) -> None:
        parts = [torch.stack((m.sum.detach().double(), m.count.double())) for m in measures.values()]
        found, self._names = torch.stack(parts), tuple(measures)
        self._sums = found if self._sums is None else self._sums + found

    def report(self, counts: Tensor) -> dict[str, float]:
        """On every rank the same: `loss`, each term as it enters the loss before its weight, and as a mean over
        the positions it was computed at (`.../mean`). Diagnostics are means. Call it on all ranks."""
        if self._sums is None:
            raise ValueError("nothing was added to this tally; every rank adds at least one row a step")
        sums = self._sums.clone()
        if dist.is_initialized():
            dist.all_reduce(sums)
        found = {"loss": 0.0}
        terms = {term.name: term for term in self._objective.terms}
        for name, (total, count) in zip(self._names, sums.tolist(), strict=True):
            term, mean = terms.get(name), total / max(count, 1.0)
            if term is None or term.weight is None:
                found[name] = mean
                continue
            share = total / term.denominator(counts)
            found["loss"] += term.weight * share
            found |= {name: share, f"{name}/mean": mean}
        return found
