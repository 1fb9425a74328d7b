"""Record the loss and the token probabilities of a dumped example at the moment it is trained on. Training never
reads them."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordexp.dumps import DumpWriter
from coordexp.objective import Objective, split_vocabulary
from coordexp.pack.collate import ExampleSpan, Row, Supervision

UNIT = 10_000  # probabilities of bins are whole numbers of 1/UNIT
LEAST = 5 / UNIT  # bins below are left out


@dataclass(frozen=True)
class TraceWriter:
    """Writes a trace for each dumped example of a row."""

    objective: Objective
    dumps: DumpWriter

    def __call__(self, row: Row, logits: Tensor, step: int) -> None:
        """`logits` are of the row's supervised positions, and `step` is the optimizer step, numbered from 1, as in
        the log."""
        for span in row.spans:
            if span.id is not None and (place := self.dumps.find(span.id)) is not None:
                values = trace(self.objective, span, logits[span.positions], row.supervision.at(span.positions))
                self.dumps.add_trace(span.id, place, step, values)


@torch.no_grad()
def trace(objective: Objective, span: ExampleSpan, logits: Tensor, supervision: Supervision) -> dict[str, Any]:
    """Return the loss of one example alone, and the model's probabilities at each supervised token, as plain JSON
    values: None where a logit is not finite. The loss is computed as in training, with broken logits clamped."""
    measures = objective.measure(logits, supervision)
    shares = objective.shares(measures, span.counts)
    split = split_vocabulary(logits, supervision.ids, objective.first_coord)
    largest = logits.amax(-1) if len(logits) else logits.new_zeros(0)  # NaN if any logit of the position is
    target = logits.gather(1, supervision.ids[:, None])[:, 0]
    is_coord = ~supervision.coord_targets.isnan() & largest.isfinite()
    bins = split.coord[is_coord].softmax(-1).cpu().numpy()
    coord_tokens = span.tokens[is_coord.cpu().numpy()].tolist()
    return {
        "loss": _round(float(objective.loss(measures, span.counts)), digits=8),
        "terms": {name: _round(float(share), digits=8) for name, share in shares.items()},
        "where": span.tokens.tolist(),
        "nll": _round_where(largest.isfinite() & target.isfinite(), split.cross_entropy()),
        "mass": _round_where(largest.isfinite(), split.coord_mass()),
        "bins": {str(token): to_runs(p) for token, p in zip(coord_tokens, bins, strict=True)},
    }


def to_runs(p: np.ndarray) -> list[list[int]]:
    """Return the likely bins as runs of neighbours: each run is its first bin, then the probability of each
    bin."""
    likely = np.flatnonzero(p >= LEAST)
    groups = np.split(likely, np.flatnonzero(np.diff(likely) > 1) + 1) if len(likely) else []
    return [[int(group[0]), *np.rint(p[group] * UNIT).astype(int).tolist()] for group in groups]


def _round_where(is_finite: Tensor, values: Tensor) -> list[float | None]:
    return [_round(value, digits=4) for value in torch.where(is_finite, values, math.nan).tolist()]


def _round(value: float, digits: int) -> float | None:
    return round(value, digits) if math.isfinite(value) else None
