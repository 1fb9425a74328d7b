"""The modules of the objective (D5): each from logits and streams to named sums, with the positions they are over.

A module is a function. It gets its own settings, the split logits, the streams, and a mask of the positions it may
use, and returns for each of its terms the sum over positions and their number. What the sum is divided by is not
its business: that is the number of positions of the term's kinds in the whole optimizer step (D19).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, smooth_l1_loss

from coordexp.config.pipeline import CoordRegConfig
from coordexp.correction import Kind, Role
from coordexp.data import BINS
from coordexp.objective.split import VocabularySplit
from coordexp.pack.collate import Supervision

COORD_ROLES = frozenset({Role.matched_coord, Role.tail_coord})
TEXT_ROLES = frozenset({Role.tail_structure, Role.tail_desc, Role.end_of_turn})
TEXT_KINDS = frozenset({Kind.structure, Kind.desc, Kind.end_of_turn})


@dataclass(frozen=True)
class Measure:
    """A sum over positions, and how many they are."""

    sum: Tensor
    count: Tensor


@dataclass(frozen=True)
class TermSpec:
    """`weight` names the setting that weighs the term; None in diagnostics."""

    weight: str | None
    roles: frozenset[Role]
    kinds: frozenset[Kind]


Split = Callable[[float], VocabularySplit]  # by temperature
Run = Callable[[Any, frozenset[str], Split, Supervision, Tensor], dict[str, Measure]]


@dataclass(frozen=True)
class ModuleKind:
    run: Run
    terms: dict[str, TermSpec]


def token_ce(
    config: Any, terms: frozenset[str], split: Split, s: Supervision, allowed: Tensor
) -> dict[str, Measure]:
    """Cross entropy of the next token over the full vocabulary: structure, desc and end of turn apart (D15)."""
    values = split(1.0).cross_entropy()
    return {name: _over(values, s, allowed & _has(s, TOKEN_CE[name].roles)) for name in sorted(terms)}


def coord_reg(
    config: CoordRegConfig, terms: frozenset[str], split: Split, s: Supervision, allowed: Tensor
) -> dict[str, Measure]:
    """Losses on the distribution over bins at coordinates, and on mass on the wrong side of the vocabulary."""
    at_temperature = split(config.temperature)
    here = allowed & _has(s, COORD_ROLES)
    ours, targets, weights = at_temperature.where(here), s.coord_targets[here], s.weights[here]
    log_p = ours.coord.log_softmax(-1)
    q = soft_target(targets, config.target_sigma, config.target_truncate).to(log_p)
    values: dict[str, Callable[[], Tensor]] = {
        "coord_ce": lambda: cross_entropy(log_p, nearest_bin(targets), reduction="none"),
        "soft_ce": lambda: -(q * log_p).sum(-1),
        "w1": lambda: wasserstein(log_p.exp(), q),
        "coord_gate": ours.coord_gate,
    }
    found = {name: Measure((values[name]() * weights).sum(), here.sum()) for name in sorted(terms - {"text_gate"})}
    if "text_gate" in terms:
        found["text_gate"] = _over(at_temperature.text_gate(), s, allowed & _has(s, TEXT_ROLES))
    return found


def bbox_geo(
    config: Any, terms: frozenset[str], split: Split, s: Supervision, allowed: Tensor
) -> dict[str, Measure]:
    """Losses on boxes decoded as expectations over bins. A box counts as its four positions, so that both terms
    are divided by coordinates as every other one."""
    from torchvision.ops import complete_box_iou_loss

    sides = _boxes(s, allowed)
    p = split(1.0).coord[sides].softmax(-1)
    boxes = (p * torch.arange(BINS, device=p.device, dtype=p.dtype)).sum(-1)
    truth, weights = s.coord_targets[sides].to(boxes), s.weights[sides]
    values = {
        "smoothl1": lambda: smooth_l1_loss(boxes, truth, reduction="none") / (BINS - 1) * weights,
        "ciou": lambda: complete_box_iou_loss(_upright(boxes), _upright(truth)) * weights.mean(1) * 4,
    }
    count = torch.tensor(sides.numel(), device=p.device)
    return {name: Measure(values[name]().sum(), count) for name in sorted(terms)}


def coord_diag(
    config: Any, terms: frozenset[str], split: Split, s: Supervision, allowed: Tensor
) -> dict[str, Measure]:
    """How coordinate distributions look, without a gradient and without decoding a coordinate (D7)."""
    whole = split(1.0)
    here, text = allowed & _has(s, COORD_ROLES), allowed & _has(s, TEXT_ROLES)
    log_p = whole.coord[here].log_softmax(-1)
    p = log_p.exp()
    target = nearest_bin(s.coord_targets[here])[:, None]
    values = {
        "entropy": -(p * log_p).sum(-1),
        "top_probability": p.amax(-1),
        "target_probability": p.gather(1, target)[:, 0],
        "coord_mass": whole.coord_mass()[here],
        "text_coord_mass": whole.coord_mass()[text],
    }
    return {
        name: Measure(values[name].sum(), torch.tensor(len(values[name]), device=p.device))
        for name in sorted(terms)
    }


def soft_target(targets: Tensor, sigma: float, truncate: int | None) -> Tensor:
    """A Gaussian over the bins around each target, which may lie between two; each row sums to 1."""
    bins = torch.arange(BINS, device=targets.device, dtype=torch.float32)
    distance = bins - targets[:, None]
    score = -0.5 * (distance / sigma) ** 2
    if truncate is not None:
        score = score.masked_fill(distance.abs() > truncate, -math.inf)
    return score.softmax(-1)


def nearest_bin(targets: Tensor) -> Tensor:
    """Half-way between two bins it is the upper one, so that a shape shifts as a whole."""
    return (targets + 0.5).floor().clamp(0, BINS - 1).long()


def wasserstein(p: Tensor, q: Tensor) -> Tensor:
    """Wasserstein-1 between distributions over bins, in units of the picture's side."""
    return (p - q).cumsum(-1).abs().sum(-1) / (BINS - 1)


def _boxes(s: Supervision, allowed: Tensor) -> Tensor:
    """[boxes, 4]: where the sides of each box stand, of the boxes that are allowed whole."""
    where = torch.nonzero(s.sides)[:, 0]
    whole = len(where) % 4 == 0
    sides = where.view(-1, 4) if whole else where[:0].view(0, 4)
    if not whole or not torch.equal(s.sides[sides], torch.tensor([1, 2, 3, 4]).to(s.sides).expand_as(sides)):
        raise ValueError("a box is supervised in part: its four coordinates are taught together or not at all")
    return sides[allowed[sides].all(1)]


def _upright(boxes: Tensor) -> Tensor:
    """At least one bin wide and high: an inverted or flat box becomes a small one, and every loss is defined."""
    corner = boxes[:, :2]
    return torch.cat((corner, torch.maximum(boxes[:, 2:], corner + 1.0)), dim=1)


def _has(s: Supervision, roles: frozenset[Role]) -> Tensor:
    """Compared one by one: no tensor has to travel to the device."""
    return functools.reduce(torch.logical_or, [s.roles == role for role in sorted(roles)])


def _over(values: Tensor, s: Supervision, mask: Tensor) -> Measure:
    return Measure((values[mask] * s.weights[mask]).sum(), mask.sum())


def _coord(weight: str | None) -> TermSpec:
    return TermSpec(weight, COORD_ROLES, frozenset({Kind.coord}))


def _text(weight: str | None) -> TermSpec:
    return TermSpec(weight, TEXT_ROLES, TEXT_KINDS)


TOKEN_CE = {
    "struct_ce": TermSpec("struct_ce_weight", frozenset({Role.tail_structure}), frozenset({Kind.structure})),
    "desc_ce": TermSpec("desc_ce_weight", frozenset({Role.tail_desc}), frozenset({Kind.desc})),
    "eos_ce": TermSpec("eos_ce_weight", frozenset({Role.end_of_turn}), frozenset({Kind.end_of_turn})),
}

MODULES: dict[str, ModuleKind] = {
    "token_ce": ModuleKind(token_ce, TOKEN_CE),
    "coord_reg": ModuleKind(
        coord_reg,
        {name: _coord(f"{name}_weight") for name in ("coord_ce", "soft_ce", "w1", "coord_gate")}
        | {"text_gate": _text("text_gate_weight")},
    ),
    "bbox_geo": ModuleKind(bbox_geo, {name: _coord(f"{name}_weight") for name in ("smoothl1", "ciou")}),
    "coord_diag": ModuleKind(
        coord_diag,
        {name: _coord(None) for name in ("entropy", "top_probability", "target_probability", "coord_mass")}
        | {"text_coord_mass": _text(None)},
    ),
}
