"""Counters and times of training steps: what happened to the rollouts, how rows were packed, where the time
went.

Counters are sums over micro-steps and ranks, and rates are ratios of sums. None of them says how well shapes
overlap; evaluation measures that.

A trace has the loss and the token probabilities of a dumped example at the moment it is trained on. Training never
reads it.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordexp.answers.correct import Choice, Correction
from coordexp.answers.entries import Reason
from coordexp.config.rollout import DecodeMode
from coordexp.data import TrueObject
from coordexp.dumps import DumpWriter
from coordexp.objective.carry import RowReport
from coordexp.objective.collate import ExampleSpan, Row, Supervision
from coordexp.objective.pipeline import Objective
from coordexp.objective.split import Split
from coordexp.ranks import sum_over_ranks
from coordexp.rollout.backend import Rollout

SUMS = (
    *("rollout/answers", "rollout/tokens", "rollout/stopped", "rollout/cut_off", "rollout/looped"),
    *("rollout/unreadable", "rollout/under_counts", "rollout/over_counts"),
    *("rollout/unused_answers", "rollout/unused_tokens", "rollout/updates_behind"),
    *(f"rollout/decoded/{mode}" for mode in ("greedy", "sampling", "beam")),
    *("parse/objects", "parse/valid", "parse/invalid", "parse/ambiguous", "parse/repeats"),
    *(f"parse/invalid/{reason.value}" for reason in Reason),
    "parse/invalid/unread",
    *("match/true", "match/matched", "match/missed", "match/extra", "match/gate_rejections"),
    *("target/prefix_tokens", "target/appended_tokens"),
    "match/agreed",
    *("target/duplicates_removed", "target/extras_removed", "target/moved"),
)
PACKING = ("rows", "fill", "segments", "waiting", "oldest_waited", "underfull")
PHASES = ("sync", "rollout", "rollout_ahead", "correct", "waited", "pictures", "compute", "step")
RATES = {
    "match/recall": ("match/matched", "match/true"),
    "match/precision": ("match/matched", "parse/valid"),
    "parse/invalid_rate": ("parse/invalid", "parse/objects"),
    "rollout/cut_off_rate": ("rollout/cut_off", "rollout/answers"),
    "rollout/under_count_rate": ("rollout/under_counts", "rollout/stopped"),
    "rollout/over_count_rate": ("rollout/over_counts", "rollout/answers"),
    "rollout/staleness": ("rollout/updates_behind", "rollout/answers"),
    "rollout/mean_tokens": ("rollout/tokens", "rollout/answers"),
    "target/mean_prefix_tokens": ("target/prefix_tokens", "rollout/answers"),
    "target/mean_appended_tokens": ("target/appended_tokens", "rollout/answers"),
}


def count_rollout(
    rollouts: Sequence[Rollout],
    choice: Choice,
    mode: DecodeMode,
    correction: Correction,
    truth: Sequence[TrueObject],
    step: int,
) -> Counter[str]:
    """Return the counters of the rollout that was chosen for a sample of this step. The others count as unused."""
    parsed, match, rollout = correction.parsed, correction.match, rollouts[choice.index]
    valid = parsed.valid
    reasons = Counter(prediction.reason for prediction in parsed.objects if prediction.reason is not None)
    stopped = rollout.finish_reason == "stop"
    counts = Counter(
        {
            "rollout/answers": 1,
            "rollout/tokens": len(rollout.ids),
            "rollout/unused_answers": len(rollouts) - 1,
            "rollout/unused_tokens": sum(len(other.ids) for other in rollouts) - len(rollout.ids),
            "rollout/updates_behind": step - rollout.version,
            "rollout/stopped": int(stopped),
            "rollout/cut_off": int(rollout.finish_reason == "length"),
            "rollout/looped": int(rollout.finish_reason == "repeat"),
            "rollout/unreadable": int(parsed.fallback),
            "rollout/under_counts": int(stopped and len(valid) < len(truth)),
            "rollout/over_counts": int(len(valid) > len(truth)),
            f"rollout/decoded/{mode}": 1,
            "parse/objects": len(parsed.objects) + parsed.unread,
            "parse/valid": len(valid),
            "parse/invalid": reasons.total() + parsed.unread,
            "parse/invalid/unread": parsed.unread,
            "parse/ambiguous": reasons[Reason.ambiguous],
            "parse/repeats": len(valid) - len({(prediction.desc, prediction.geometry) for prediction in valid}),
            "match/true": len(truth),
            "match/matched": len(match.pairs),
            "match/missed": len(match.missed),
            "match/agreed": len(choice.agreed or ()),
            "match/extra": len(match.false_positives),
            "match/gate_rejections": match.gate_rejections,
            "target/prefix_tokens": correction.own_tokens,
            "target/appended_tokens": len(correction.segment)
            - correction.segment.prompt_length
            - correction.own_tokens,
        }
    )
    if rebuilt := correction.rebuilt:
        counts["target/duplicates_removed"] = len(rebuilt.duplicates)
        counts["target/extras_removed"] = len(rebuilt.removed_extras)
        counts["target/moved"] = len(rebuilt.moved)
    counts.update({f"parse/invalid/{reason.value}": count for reason, count in reasons.items()})
    return counts


class StepMetrics:
    """The counters, seconds by phase and packing of one rank since the last report."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._packing: dict[str, float] = defaultdict(float)
        self._step_began: float | None = None

    def add(self, counts: Mapping[str, int]) -> None:
        self._sums.update(counts)

    def add_row(self, row: RowReport) -> None:
        for name, value in {"rows": 1, **vars(row)}.items():
            self._packing[name] += value

    def add_seconds(self, phase: str, seconds: float) -> None:
        self._seconds[phase] += seconds

    @contextmanager
    def measure(self, phase: str, without: Sequence[str] = ()) -> Iterator[None]:
        """Add the time of the block to a phase. `without` names phases inside it, whose time is subtracted."""
        since, inside = time.perf_counter(), sum(self._seconds[name] for name in without)
        yield
        inside = sum(self._seconds[name] for name in without) - inside
        self.add_seconds(phase, time.perf_counter() - since - inside)

    def begin_step(self) -> None:
        self._step_began = time.perf_counter()

    def end_step(self) -> None:
        if self._step_began is not None:
            self.add_seconds("step", time.perf_counter() - self._step_began)
            self._step_began = None

    def report(self, steps: int) -> dict[str, float]:
        """Return the metrics of all ranks, the same on every rank, and start again from zero. Times are means over
        steps and ranks."""
        names = (*SUMS, *PACKING, *PHASES, "ranks")
        own = [
            *(self._sums[name] for name in SUMS),
            *(self._packing[name] for name in PACKING),
            *(self._seconds[name] for name in PHASES),
            1,
        ]
        total = dict(zip(names, sum_over_ranks([float(value) for value in own]), strict=True))
        self._sums, self._seconds, self._packing = Counter(), defaultdict(float), defaultdict(float)
        metrics: dict[str, float] = {}
        if total["rollout/answers"]:
            metrics |= {name: total[name] for name in SUMS}
            metrics |= {name: total[top] / total[below] for name, (top, below) in RATES.items() if total[below]}
        if rows := total["rows"]:
            metrics |= {f"packing/{name}": total[name] / rows for name in PACKING if name != "rows"}
        metrics |= {f"time/{phase}": total[phase] / (steps * total["ranks"]) for phase in PHASES if total[phase]}
        return metrics


UNIT = 10_000  # probabilities of bins are whole numbers of 1/UNIT
LEAST = 5 / UNIT  # bins below are left out


@dataclass(frozen=True)
class TraceWriter:
    """Writes a trace for each dumped example of a row."""

    objective: Objective
    dumps: DumpWriter

    @torch.no_grad()
    def __call__(self, row: Row, split: Split, step: int) -> None:
        """`split` is that of the row's supervised positions, and `step` is the optimizer step, numbered from 1, as
        in the log."""
        for span in row.spans:
            if span.id is not None and (place := self.dumps.find(span.id)) is not None:
                values = trace(self.objective, span, split.at(span.positions), row.supervision.at(span.positions))
                self.dumps.add_trace(span.id, place, step, values)


@torch.no_grad()
def trace(objective: Objective, span: ExampleSpan, split: Split, supervision: Supervision) -> dict[str, Any]:
    """Return the loss of one example alone, and the model's probabilities at each supervised token, as plain JSON
    values: None where a logit is broken. The loss is computed as in training, with broken logits clamped."""
    measures = objective.measure(split, supervision)
    shares = objective.shares(measures, span.counts)
    whole = split(1.0)
    is_intact = whole.broken == 0
    is_coord = ~supervision.coord_targets.isnan() & is_intact
    bins = whole.coord[is_coord].softmax(-1).cpu().numpy()
    coord_tokens = span.tokens[is_coord.cpu().numpy()].tolist()
    return {
        "loss": _round(float(objective.loss(measures, span.counts)), digits=8),
        "terms": {name: _round(float(share), digits=8) for name, share in shares.items()},
        "where": span.tokens.tolist(),
        "nll": _round_where(is_intact, whole.cross_entropy()),
        "mass": _round_where(is_intact, whole.coord_mass()),
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
