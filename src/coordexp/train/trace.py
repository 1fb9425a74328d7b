"""What the model said about an example when it was trained on it, for people: a line beside the dumped example.

Comes in: the logits and the supervision of one example, as the trainer has them. Goes out: the loss of the example
alone, by the run's own objective, and what was thought likely at each supervised token. Nothing here reaches the
training step.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordexp.dumps import TRACE_FORMAT
from coordexp.objective import Objective, split_vocabulary
from coordexp.pack.collate import Supervision, Watched
from coordexp.train.dump_folder import DumpFolder

UNIT = 10_000  # probabilities of bins are whole numbers of 1/UNIT
LEAST = 5 / UNIT  # bins below are left out


@dataclass(frozen=True)
class Traces:
    """The trainer's `trace`: `trained-000099.jsonl` for examples of `step-000099.jsonl`."""

    objective: Objective
    folder: DumpFolder

    def __call__(self, watched: Watched, logits: Tensor, supervision: Supervision, step: int) -> None:
        file, _, line = watched.dumped.rpartition(":")
        whole = {"format": TRACE_FORMAT, "example": int(line), "step": step}
        whole |= traced(self.objective, watched, logits, supervision)
        self.folder.add_trained(file, json.dumps(whole, allow_nan=False))


@torch.no_grad()
def traced(objective: Objective, watched: Watched, logits: Tensor, supervision: Supervision) -> dict[str, Any]:
    """As plain JSON values: None where a logit is no number. The loss is what training makes of such logits."""
    measures = objective.measure(logits, supervision)
    shares = objective.shares(measures, watched.counts)
    split = split_vocabulary(logits, supervision.ids, objective.first_coord)
    largest = logits.amax(-1) if len(logits) else logits.new_zeros(0)  # not a number where any is none
    target = logits.gather(1, supervision.ids[:, None])[:, 0]
    is_coord = ~supervision.coord_targets.isnan() & largest.isfinite()
    bins = split.coord[is_coord].softmax(-1).cpu().numpy()
    where = watched.where.tolist()
    coords = watched.where[is_coord.cpu().numpy()].tolist()
    return {
        "loss": _plain(float(objective.loss(measures, watched.counts)), digits=8),
        "terms": {name: _plain(float(share), digits=8) for name, share in shares.items()},
        "where": where,
        "nll": _each(split.cross_entropy(), largest.isfinite() & target.isfinite()),
        "mass": _each(split.coord_mass(), largest.isfinite()),
        "bins": {str(position): runs(p) for position, p in zip(coords, bins, strict=True)},
    }


def runs(p: np.ndarray) -> list[list[int]]:
    """The bins that matter, as runs of neighbours: the first bin, then the probability of each."""
    kept = np.flatnonzero(p >= LEAST)
    groups = np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1) if len(kept) else []
    return [[int(group[0]), *np.rint(p[group] * UNIT).astype(int).tolist()] for group in groups]


def _each(values: Tensor, sound: Tensor) -> list[float | None]:
    return [_plain(value, digits=4) for value in torch.where(sound, values, math.nan).tolist()]


def _plain(value: float, digits: int) -> float | None:
    return round(value, digits) if math.isfinite(value) else None
