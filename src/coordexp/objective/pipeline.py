"""The objective of a run: built once from the declared pipeline, and called for every row. A module that is not
declared is not computed."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coordexp.config.rules import idle_reason
from coordexp.config.sections import Channel, Module
from coordexp.config.settings import Settings
from coordexp.correction import Role, TokenKind
from coordexp.extensions import resolve_part
from coordexp.objective.modules import MODULES, Measure, ModuleKind, Split
from coordexp.pack.collate import CHANNELS, Supervision

# Every pipeline reports this: the number of logits per position that were NaN, infinite or outside the fence.
BROKEN = "broken_logits"


@dataclass(frozen=True)
class Term:
    """An active loss term or diagnostic. `weight` is None for diagnostics, which are means over positions."""

    name: str
    weight: float | None
    channels: frozenset[Channel]
    kinds: frozenset[TokenKind]

    def denominator(self, counts: Tensor) -> int:
        """Return the number of positions of the term's kinds in all answers of the optimizer step, and at least 1.

        Masked positions and all channels are included, so that the weight of a supervised position does not depend
        on how many others are masked.
        """
        return max(1, int(counts[sorted(self.kinds)].sum()))


@dataclass(frozen=True)
class ActiveModule:
    """A declared module that runs, with those of its terms that have a weight above 0 or are diagnostics."""

    module: Module
    terms: tuple[str, ...]
    channels: frozenset[Channel]

    @property
    def kind(self) -> ModuleKind:
        return find_kind(self.module)

    @property
    def is_diagnostic(self) -> bool:
        return all(self.kind.terms[name].weight is None for name in self.terms)


class Objective:
    """The weighted sum of losses that a config declares, with its diagnostics."""

    def __init__(self, settings: Settings, first_coord: int) -> None:
        pipeline = settings.pipeline
        if pipeline is None:
            raise ValueError(f"{settings.pipeline_path}: missing; an objective needs a declared pipeline")
        declared = (*pipeline.objective, *pipeline.diagnostics)
        self.first_coord = first_coord
        self.idle = {module.name: why for module in declared if (why := idle_reason(module, settings))}
        self.modules = tuple(
            _activate(module, settings) for module in declared if not idle_reason(module, settings)
        )
        self.terms = tuple(term for active in self.modules for term in _terms(active))
        self._masked = _channels_without_desc(self.modules)

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

    def measure(self, logits: Tensor, supervision: Supervision) -> dict[str, Measure]:
        """Return the sum and count of every term over one row, in the order of `terms`. `logits` are [positions,
        vocabulary]."""
        if len(logits) != len(supervision.ids):
            raise ValueError(f"{len(logits)} rows of logits for {len(supervision.ids)} supervised positions")

        split = Split(logits, supervision, self.first_coord)
        measures: dict[str, Measure] = {}
        for active in self.modules:
            allowed = self._allow_positions(active, supervision)
            with torch.set_grad_enabled(torch.is_grad_enabled() and not active.is_diagnostic):
                of_module = active.kind.run(
                    active.module.config, frozenset(active.terms), split, supervision, allowed
                )
            measures |= {f"{active.module.name}/{name}": of_module[name] for name in active.terms}
        broken = Measure(split.count_broken(), torch.tensor(len(logits), device=logits.device))
        return measures | {BROKEN: broken}

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
                "divided_by": sorted(kind.name for kind in term.kinds) if term.weight is not None else "positions",
            }
            for term in self.terms
        ]
        return {"terms": runs, "idle": self.idle, "masked_desc": sorted(self._masked)}

    def _allow_positions(self, active: ActiveModule, s: Supervision) -> Tensor:
        """Return a mask of the positions that a module may use."""
        allowed = _is_on_channel(active.channels, s) & ((s.weights > 0) | (s.unlikely >= 0))
        if self._masked and active.module.name != "duplicate_ul":
            allowed &= ~(_is_on_channel(self._masked, s) & (s.roles == Role.tail_desc))
        return allowed


def find_kind(module: Module) -> ModuleKind:
    """Return how a module is computed. A module of another package names its own `ModuleKind`."""
    if module.name in MODULES:
        return MODULES[module.name]
    kind: ModuleKind = resolve_part(module.kind)
    return kind


def _activate(module: Module, settings: Settings) -> ActiveModule:
    specs = find_kind(module).terms
    active = tuple(
        name for name, spec in specs.items() if spec.weight is None or getattr(module.config, spec.weight) > 0
    )
    return ActiveModule(module, active, settings.channels & frozenset(module.channels))


def _terms(active: ActiveModule) -> list[Term]:
    module, terms = active.module, []
    for name in active.terms:
        spec = active.kind.terms[name]
        weight = None if spec.weight is None else module.weight * getattr(module.config, spec.weight)
        terms.append(Term(f"{module.name}/{name}", weight, active.channels, spec.kinds))
    return terms


def _channels_without_desc(modules: Sequence[ActiveModule]) -> frozenset[Channel]:
    """Return the channels on which `desc` is masked: those of a token_ce with a desc_ce_weight of 0. No other
    module uses the tokens of a masked `desc` either."""
    masked = [
        active.channels
        for active in modules
        if active.module.name == "token_ce" and active.module.config.desc_ce_weight == 0
    ]
    return frozenset().union(*masked)


def _is_on_channel(channels: frozenset[Channel], s: Supervision) -> Tensor:
    return functools.reduce(
        torch.logical_or, [s.channels == CHANNELS.index(channel) for channel in sorted(channels)]
    )
