"""The declared pipeline, built once and called for every row. What is not declared is not computed."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coordexp.config.pipeline import Channel, Module
from coordexp.config.rules import idle
from coordexp.config.settings import Settings
from coordexp.correction import Kind, Role
from coordexp.objective.modules import MODULES, Measure, ModuleKind
from coordexp.objective.split import VocabularySplit, split_vocabulary
from coordexp.pack.collate import CHANNELS, Supervision

# Reported by every pipeline: logits that were no numbers, or too large to be any, a position.
BROKEN = "broken_logits"


@dataclass(frozen=True)
class Term:
    """One loss term or diagnostic that runs. `weight` is None in diagnostics, which are means over positions."""

    name: str
    weight: float | None
    channels: frozenset[Channel]
    kinds: frozenset[Kind]

    def denominator(self, counts: Tensor) -> int:
        """Positions of its kinds in the answers, supervised or masked, on any channel (D19); at least 1."""
        return max(1, int(counts[sorted(self.kinds)].sum()))


@dataclass(frozen=True)
class Entry:
    """A module that runs, with those of its terms that weigh something."""

    module: Module
    terms: tuple[str, ...]
    channels: frozenset[Channel]

    @property
    def kind(self) -> ModuleKind:
        return MODULES[self.module.name]


class Objective:
    def __init__(self, settings: Settings, first_coord: int) -> None:
        pipeline = settings.pipeline
        if pipeline is None:
            raise ValueError(
                f"{settings.pipeline_path}: missing; an objective is built from what is declared there"
            )
        declared = (*pipeline.objective, *pipeline.diagnostics)
        self.first_coord = first_coord
        self.idle = {module.name: why for module in declared if (why := idle(module, settings))}
        self.entries = tuple(_entry(module, settings) for module in declared if not idle(module, settings))
        self.terms = tuple(term for entry in self.entries for term in _terms(entry))
        self._masked = _masked_desc(self.entries)

    def roles(self) -> dict[Channel, frozenset[Role]]:
        """The tokens of each channel that any module looks at: logits are needed there and nowhere else."""
        return {
            channel: frozenset(
                role
                for entry in self.entries
                if channel in entry.channels
                for name in entry.terms
                for role in entry.kind.terms[name].roles
            )
            - ({Role.tail_desc} if channel in self._masked else set())
            for channel in CHANNELS
        }

    def measure(self, logits: Tensor, supervision: Supervision) -> dict[str, Measure]:
        """Every term's sum and count over one row, in the order of `terms`. `logits`: [positions, vocabulary]."""
        if len(logits) != len(supervision.ids):
            raise ValueError(f"{len(logits)} rows of logits, and {len(supervision.ids)} supervised positions")

        splits: dict[float, VocabularySplit] = {}

        def split(temperature: float) -> VocabularySplit:
            if temperature not in splits:
                splits[temperature] = split_vocabulary(logits, supervision.ids, self.first_coord, temperature)
            return splits[temperature]

        found: dict[str, Measure] = {}
        for entry in self.entries:
            run = functools.partial(entry.kind.run, entry.module.config, frozenset(entry.terms), split)
            with torch.set_grad_enabled(torch.is_grad_enabled() and not _is_diagnostic(entry)):
                measures = run(supervision, self._allowed(entry, supervision))
            found |= {f"{entry.module.name}/{name}": measures[name] for name in entry.terms}
        return found | {BROKEN: Measure(*_broken(splits, logits))}

    def loss(self, measures: dict[str, Measure], counts: Tensor) -> Tensor:
        """The weighted sum of the terms, each divided by its positions in the whole optimizer step (D19)."""
        return torch.stack(list(self.shares(measures, counts).values())).sum()

    def shares(self, measures: dict[str, Measure], counts: Tensor) -> dict[str, Tensor]:
        """What each term adds to the loss."""
        return {
            term.name: term.weight * measures[term.name].sum / term.denominator(counts)
            for term in self.terms
            if term.weight is not None
        }

    def manifest(self) -> dict[str, Any]:
        """What runs and what does not, for the log and the run folder (D6)."""
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

    def _allowed(self, entry: Entry, s: Supervision) -> Tensor:
        allowed = _on(entry.channels, s) & (s.weights > 0)
        if self._masked:
            allowed &= ~(_on(self._masked, s) & (s.roles == Role.tail_desc))
        return allowed


def _entry(module: Module, settings: Settings) -> Entry:
    specs = MODULES[module.name].terms
    active = tuple(
        name for name, spec in specs.items() if spec.weight is None or getattr(module.config, spec.weight) > 0
    )
    return Entry(module, active, settings.channels & frozenset(module.channels))


def _is_diagnostic(entry: Entry) -> bool:
    return all(entry.kind.terms[name].weight is None for name in entry.terms)


def _terms(entry: Entry) -> list[Term]:
    found = []
    for name in entry.terms:
        spec = entry.kind.terms[name]
        weight = None if spec.weight is None else entry.module.weight * getattr(entry.module.config, spec.weight)
        found.append(Term(f"{entry.module.name}/{name}", weight, entry.channels, spec.kinds))
    return found


def _masked_desc(entries: Sequence[Entry]) -> frozenset[Channel]:
    """Where `desc` is masked: on the channels of a token_ce whose desc_ce_weight is 0 (D15)."""
    masked = [e.channels for e in entries if e.module.name == "token_ce" and e.module.config.desc_ce_weight == 0]
    return frozenset().union(*masked)


def _on(channels: frozenset[Channel], s: Supervision) -> Tensor:
    return functools.reduce(
        torch.logical_or, [s.channels == CHANNELS.index(channel) for channel in sorted(channels)]
    )


def _broken(splits: dict[float, VocabularySplit], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of any temperature: the fence comes first."""
    return next(iter(splits.values())).broken, torch.tensor(len(logits), device=logits.device)
