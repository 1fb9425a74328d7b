"""The objective of a run: built once from the declared pipeline, and called for every row. A module that is not
declared is not computed.

The denominators of all terms are known from the data before the first backward pass, so the loss of each
micro-step is its exact share of the loss of the step. Gradients therefore add up to the same sum, whatever the
packing, the accumulation or the number of ranks, and clipping the accumulated gradient clips the gradient of the
whole step.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from coordexp.answers.segment import Role, TokenKind
from coordexp.config.rules import idle_reason, running_channels
from coordexp.config.sections import Channel, Module
from coordexp.config.settings import Settings
from coordexp.extensions import resolve_part
from coordexp.objective.collate import CHANNELS, ExampleSpan, Row, Supervision
from coordexp.objective.modules import Measure, ModuleKind
from coordexp.objective.split import Split, SplitRequest

# Every pipeline reports this: the number of logits per position that were NaN, infinite or outside the fence.
BROKEN = "broken_logits"


@dataclass(frozen=True)
class Term:
    """An active loss term or diagnostic. `weight` is None for diagnostics, which are means over positions, unless
    they are `part_of` a loss term and are divided as that term is."""

    name: str
    weight: float | None
    channels: frozenset[Channel]
    kinds: frozenset[TokenKind]
    part_of: str | None = None

    @property
    def is_mean(self) -> bool:
        """Whether it is reported as a mean over the positions at which it was computed, and in no other way."""
        return self.weight is None and self.part_of is None

    def denominator(self, counts: Tensor) -> int:
        """Return the number of positions of the term's kinds in all answers of the optimizer step, and at least 1.

        Masked positions and all channels are included, so that the weight of a supervised position does not depend
        on how many others are masked.
        """
        return max(1, int(counts[sorted(self.kinds)].sum()))


@dataclass(frozen=True)
class ActiveModule:
    """A declared module that runs, with those of its terms that have a weight above 0 or are diagnostics. A
    diagnostic that is a part of another term needs that term."""

    module: Module
    kind: ModuleKind
    terms: tuple[str, ...]
    channels: frozenset[Channel]

    @property
    def is_diagnostic(self) -> bool:
        return all(self.kind.terms[name].weight is None for name in self.terms)


class Objective:
    """The weighted sum of losses that a config declares, with its diagnostics."""

    def __init__(self, settings: Settings, first_coord: int | None) -> None:
        assert settings.pipeline is not None, "the rules of settings require a declared pipeline"
        declared = (*settings.pipeline.objective, *settings.pipeline.diagnostics)
        self.first_coord = first_coord
        self.idle = {module.name: why for module in declared if (why := idle_reason(module, settings))}
        self.modules = tuple(_activate(module, settings) for module in declared if module.name not in self.idle)
        self.terms = tuple(term for active in self.modules for term in _terms(active))
        # The channels on which no module uses the tokens of `desc`.
        self._masked = frozenset[Channel]().union(
            *(active.channels for active in self.modules if active.module.config.masks_desc)
        )

    def roles(self) -> dict[Channel, frozenset[Role]]:
        """Return, by channel, the roles that any module uses there. Logits are needed at their tokens and nowhere
        else."""
        return {
            channel: frozenset(
                role
                for active in self.modules
                if channel in active.channels
                for name in active.terms
                for role in active.kind.terms[name].roles
            )
            - ({Role.tail_desc} if channel in self._masked else set())
            for channel in CHANNELS
        }

    def request_split(self, supervision: Supervision) -> SplitRequest:
        """Return how the logits of a row have to be split for the modules."""
        configs = [active.module.config for active in self.modules]
        others = {getattr(config, "temperature", 1.0) for config in configs} - {1.0}
        return SplitRequest(supervision.ids, self.first_coord, (1.0, *sorted(others)))

    def measure(self, split: Split, supervision: Supervision) -> dict[str, Measure]:
        """Return the sum and count of every term over one row, in the order of `terms`."""
        measures: dict[str, Measure] = {}
        for active in self.modules:
            allowed = self._allow_positions(active, supervision)
            with torch.set_grad_enabled(torch.is_grad_enabled() and not active.is_diagnostic):
                of_module = active.kind.run(
                    active.module.config, frozenset(active.terms), split, supervision, allowed
                )
            measures |= {f"{active.module.name}/{name}": of_module[name] for name in active.terms}
        broken = split(1.0).broken
        return measures | {BROKEN: Measure(broken.sum(), torch.tensor(len(broken), device=broken.device))}

    def loss(self, measures: dict[str, Measure], counts: Tensor) -> Tensor:
        """Return the weighted sum of the terms, each divided by its number of positions in the whole optimizer
        step."""
        return torch.stack(list(self.shares(measures, counts).values())).sum()

    def shares(self, measures: dict[str, Measure], counts: Tensor) -> dict[str, Tensor]:
        """Return the contribution of each term to the loss."""
        return {
            term.name: term.weight * measures[term.name].sum / term.denominator(counts)
            for term in self.terms
            if term.weight is not None
        }

    def manifest(self) -> dict[str, Any]:
        """Return which terms run and which modules do not, for `run.json`."""
        runs = [
            {
                "term": term.name,
                "weight": term.weight,
                "channels": sorted(term.channels),
                "divided_by": "positions" if term.is_mean else sorted(kind.name for kind in term.kinds),
            }
            for term in self.terms
        ]
        return {"terms": runs, "idle": self.idle, "masked_desc": sorted(self._masked)}

    def _allow_positions(self, active: ActiveModule, s: Supervision) -> Tensor:
        """Return a mask of the positions that a module may use."""
        allowed = _is_on_channel(active.channels, s) & (s.weights > 0)
        if self._masked:
            allowed &= ~(_is_on_channel(self._masked, s) & (s.roles == Role.tail_desc))
        return allowed


def _activate(module: Module, settings: Settings) -> ActiveModule:
    kind: ModuleKind = resolve_part(module.config.kind)
    active = tuple(
        name for name, spec in kind.terms.items() if spec.weight is None or getattr(module.config, spec.weight) > 0
    )
    computed = tuple(name for name in active if kind.terms[name].part_of in (None, *active))
    return ActiveModule(module, kind, computed, running_channels(module, settings))


def _terms(active: ActiveModule) -> list[Term]:
    module, terms = active.module, []
    for name in active.terms:
        spec = active.kind.terms[name]
        weight = None if spec.weight is None else module.weight * getattr(module.config, spec.weight)
        part_of = None if spec.part_of is None else f"{module.name}/{spec.part_of}"
        terms.append(Term(f"{module.name}/{name}", weight, active.channels, spec.kinds, part_of))
    return terms


def _is_on_channel(channels: frozenset[Channel], s: Supervision) -> Tensor:
    return functools.reduce(
        torch.logical_or, [s.channels == CHANNELS.index(channel) for channel in sorted(channels)]
    )


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
        the positions at which it was computed (`.../mean`). Diagnostics are means over positions, but a part of a
        term is normalised as the term is. Call this on all ranks. All of them get the same result.
        """
        sums = self._sums if self._sums is not None else torch.zeros(len(self._names), 3, dtype=torch.float64)
        self._sums = None
        if dist.is_initialized():
            dist.all_reduce(sums)
        metrics = {"loss": 0.0}
        for name, (share, total, count) in zip(self._names, sums.tolist(), strict=True):
            term, mean = self._terms.get(name), total / max(count, 1.0)
            if term is None or term.is_mean:
                metrics[name] = mean
                continue
            metrics["loss"] += (term.weight or 0.0) * share / steps
            metrics |= {name: share / steps, f"{name}/mean": mean}
        return metrics


class SetTally:
    """The loss and the number of samples and tokens of each data set of a mixture, over one or more optimizer
    steps, for reports. The loss of a set is that of its examples alone: each term is divided by the positions of
    its kinds in the answers of the set."""

    def __init__(self, objective: Objective, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._objective = objective
        self._terms = [term for term in objective.terms if term.weight is not None]
        self._start()

    def _start(self) -> None:
        # One row per set: the sums of all terms; tokens of answers by kind; samples and tokens.
        self._sums: Tensor = torch.zeros(len(self.names), len(self._terms), dtype=torch.float64)
        self._counts = torch.zeros(len(self.names), len(TokenKind), dtype=torch.float64)
        self._sizes = torch.zeros(len(self.names), 2, dtype=torch.float64)

    @torch.no_grad()
    def add(self, row: Row, split: Split, measures: dict[str, Measure]) -> None:
        """Add a row. `measures` are those of the whole row."""
        by_set: dict[int, list[ExampleSpan]] = {}
        for span in row.spans:
            by_set.setdefault(span.data_set, []).append(span)
            self._counts[span.data_set] += span.counts
            self._sizes[span.data_set] += torch.tensor([1, span.length])
        for data_set, spans in by_set.items():
            own = measures
            if len(by_set) > 1:
                parts = [torch.arange(span.positions.start, span.positions.stop) for span in spans]
                positions = torch.cat(parts).to(split.columns.device)
                own = self._objective.measure(split.at(positions), row.supervision.at(positions))
            sums = torch.stack([own[term.name].sum for term in self._terms]).double()
            self._sums = self._sums.to(sums.device)
            self._sums[data_set] += sums

    def report(self) -> dict[str, float]:
        """Return the metrics of all ranks since the last report, and start again from zero. Call this on all
        ranks. A set without samples has no loss."""
        numbers = torch.cat((self._sums, self._counts.to(self._sums.device), self._sizes.to(self._sums.device)), 1)
        self._start()
        if dist.is_initialized():
            dist.all_reduce(numbers)
        sums, counts, sizes = numbers.cpu().split([len(self._terms), len(TokenKind), 2], dim=1)
        metrics: dict[str, float] = {}
        for k, name in enumerate(self.names):
            samples, tokens = sizes[k].tolist()
            if samples:
                terms = zip(self._terms, sums[k].tolist(), strict=True)
                metrics[f"set/{name}/loss"] = sum(
                    (term.weight or 0.0) * total / term.denominator(counts[k]) for term, total in terms
                )
            metrics |= {f"set/{name}/samples": samples, f"set/{name}/tokens": tokens}
        return metrics
