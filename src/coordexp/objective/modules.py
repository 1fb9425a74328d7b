"""The modules of the objective. Each computes its loss terms or diagnostics from the logits of one row.

A module is a function. Its arguments are its own settings, the names of its active terms, the split logits, the
supervision of the row, and a mask of the positions it may use. It returns, for each term, the sum over positions
and their number. It does not divide the sum: the denominator is the number of positions of the term's kinds in
the whole optimizer step, which no single row knows.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, smooth_l1_loss

from coordexp.answers.segment import Role, TokenKind
from coordexp.config.sections import CoordRegConfig
from coordexp.data import BINS
from coordexp.objective.collate import Supervision
from coordexp.objective.split import Split

COORD_ROLES = frozenset({Role.matched_coord, Role.tail_coord})
TEXT_ROLES = frozenset({Role.tail_structure, Role.tail_desc, Role.end_of_turn})
ANSWER_ROLES = frozenset({Role.answer})
TEXT_KINDS = frozenset({TokenKind.structure, TokenKind.desc, TokenKind.end_of_turn})


@dataclass(frozen=True)
class Measure:
    """A sum over positions, and the number of positions."""

    sum: Tensor
    count: Tensor


@dataclass(frozen=True)
class TermSpec:
    """A term of a module. `weight` is the name of the setting with its weight, or None for a diagnostic.

    `roles` are the positions that it is computed at: the vocabulary projection skips what no active term names,
    and positions of weight 0. Its sum is divided by the number of tokens of `kinds`.

    A diagnostic may belong to another term of its module, `part_of`. It is then computed with that term only, and
    is divided by the same number of positions."""

    weight: str | None
    roles: frozenset[Role]
    kinds: frozenset[TokenKind]
    part_of: str | None = None


Run = Callable[[Any, frozenset[str], Split, Supervision, Tensor], dict[str, Measure]]


@dataclass(frozen=True)
class ModuleKind:
    run: Run
    terms: dict[str, TermSpec]


def token_ce(
    config: Any, terms: frozenset[str], split: Split, s: Supervision, allowed: Tensor
) -> dict[str, Measure]:
    """Cross entropy of the next token over the full vocabulary. Structure, desc and end of turn are separate
    terms, so that each has a weight of its own."""
    values = split(1.0).cross_entropy()
    return {name: sum_over(values, s, allowed & has_role(s, TOKEN_CE.terms[name].roles)) for name in sorted(terms)}


def coord_reg(
    config: CoordRegConfig, terms: frozenset[str], split: Split, s: Supervision, allowed: Tensor
) -> dict[str, Measure]:
    """Losses on the distribution over bins at coordinate positions, and on probability mass in the wrong part of
    the vocabulary."""
    at_temperature = split(config.temperature)
    here = allowed & has_role(s, COORD_ROLES)
    at_coords, targets, weights = at_temperature.where(here), s.coord_targets[here], s.weights[here]
    log_p = at_coords.coord.log_softmax(-1)
    q = soft_target(targets, config.target_sigma, config.target_truncate).to(log_p)
    values: dict[str, Tensor] = {}
    if "coord_ce" in terms:
        values["coord_ce"] = cross_entropy(log_p, nearest_bin(targets), reduction="none")
    if "coord_gate" in terms:
        values["coord_gate"] = at_coords.coord_gate()
    if "soft_ce" in terms:
        values["soft_ce"] = -(q * log_p).sum(-1)
    if "soft_kl" in terms:  # soft_ce without the entropy of its target, which no model can get below
        values["soft_kl"] = kl_div(log_p.detach(), q, reduction="none").sum(-1)
    if "w1" in terms:
        values["w1"] = wasserstein(log_p.exp(), q)
    measures = {name: Measure((value * weights).sum(), here.sum()) for name, value in values.items()}
    if "text_gate" in terms:
        measures["text_gate"] = sum_over(at_temperature.text_gate(), s, allowed & has_role(s, TEXT_ROLES))
    return measures


def bbox_geo(
    config: Any, terms: frozenset[str], split: Split, s: Supervision, allowed: Tensor
) -> dict[str, Measure]:
    """Losses on boxes whose sides are decoded as expectations over bins. A box counts as four positions, so that
    both terms are divided by a number of coordinates, like the terms of the other modules."""
    from torchvision.ops import complete_box_iou_loss

    sides = find_boxes(s, allowed)
    p = split(1.0).coord[sides].softmax(-1)
    boxes = (p * torch.arange(BINS, device=p.device, dtype=p.dtype)).sum(-1)
    truth, weights = s.coord_targets[sides].to(boxes), s.weights[sides]
    values: dict[str, Tensor] = {}
    if "ciou" in terms:
        values["ciou"] = complete_box_iou_loss(_with_area(boxes), _with_area(truth)) * weights.mean(1) * 4
    if "smoothl1" in terms:
        values["smoothl1"] = smooth_l1_loss(boxes, truth, reduction="none") / (BINS - 1) * weights
    count = torch.tensor(sides.numel(), device=p.device)
    return {name: Measure(value.sum(), count) for name, value in values.items()}


def coord_diag(
    config: Any, terms: frozenset[str], split: Split, s: Supervision, allowed: Tensor
) -> dict[str, Measure]:
    """Diagnostics of the distributions over bins. They have no gradient, and they do not decode a coordinate:
    that is left to `bbox_geo`, so that a pipeline without it never computes one."""
    whole = split(1.0)
    here, text = allowed & has_role(s, COORD_ROLES), allowed & has_role(s, TEXT_ROLES)
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


def number_ce(
    config: Any, terms: frozenset[str], split: Split, s: Supervision, allowed: Tensor
) -> dict[str, Measure]:
    """Cross entropy of the digits of native answers, over the full vocabulary."""
    return {"ce": sum_over(split(1.0).cross_entropy(), s, allowed & has_role(s, COORD_ROLES))}


def chat_ce(
    config: Any, terms: frozenset[str], split: Split, s: Supervision, allowed: Tensor
) -> dict[str, Measure]:
    """Cross entropy of the next token over the full vocabulary, at the answers of chat records."""
    here = allowed & has_role(s, ANSWER_ROLES)
    return {"answer_ce": sum_over(split(1.0).cross_entropy(), s, here)}


def soft_target(targets: Tensor, sigma: float, truncate: int | None) -> Tensor:
    """Return a Gaussian over the bins around each target, which may lie between two bins. Each row sums to 1."""
    bins = torch.arange(BINS, device=targets.device, dtype=torch.float32)
    distance = bins - targets[:, None]
    score = -0.5 * (distance / sigma) ** 2
    if truncate is not None:
        score = score.masked_fill(distance.abs() > truncate, -math.inf)
    return score.softmax(-1)


def nearest_bin(targets: Tensor) -> Tensor:
    """Return the bin nearest to each target. A target half-way between two bins takes the upper one, so that all
    coordinates of a shape are rounded in the same direction."""
    return (targets + 0.5).floor().clamp(0, BINS - 1).long()


def wasserstein(p: Tensor, q: Tensor) -> Tensor:
    """Return the Wasserstein-1 distance between distributions over bins, in units of the side of the image."""
    difference = p - q
    if torch.are_deterministic_algorithms_enabled():  # CUDA has no deterministic cumsum of floats
        ones = torch.ones(BINS, BINS, dtype=torch.float64, device=p.device)
        cumulative = (difference.double() @ ones.triu()).to(p)
    else:
        cumulative = difference.cumsum(-1)
    return cumulative.abs().sum(-1) / (BINS - 1)


def find_boxes(s: Supervision, allowed: Tensor) -> Tensor:
    """Return the positions of the sides of each box, as [boxes, 4], for boxes whose positions are all allowed."""
    where = torch.nonzero(s.sides)[:, 0]
    is_whole = len(where) % 4 == 0
    sides = where.view(-1, 4) if is_whole else where[:0].view(0, 4)
    if not is_whole or not torch.equal(s.sides[sides], torch.tensor([1, 2, 3, 4]).to(s.sides).expand_as(sides)):
        raise ValueError("a box is supervised in part: supervise all four of its coordinates, or none")
    return sides[allowed[sides].all(1)]


def _with_area(boxes: Tensor) -> Tensor:
    """Return the boxes, made at least one bin wide and high, so that the loss of an inverted or flat box is
    defined."""
    corner = boxes[:, :2]
    return torch.cat((corner, torch.maximum(boxes[:, 2:], corner + 1.0)), dim=1)


def has_role(s: Supervision, roles: frozenset[Role]) -> Tensor:
    """Return a mask of the positions with one of the roles. Roles are compared one after the other, because a
    tensor of them would have to be copied to the device."""
    return functools.reduce(torch.logical_or, [s.roles == role for role in sorted(roles)])


def sum_over(values: Tensor, s: Supervision, mask: Tensor) -> Measure:
    """Return the weighted sum of the values at the positions in `mask`, and the number of these positions."""
    return Measure((values[mask] * s.weights[mask]).sum(), mask.sum())


def _coord_term(weight: str | None, part_of: str | None = None) -> TermSpec:
    return TermSpec(weight, COORD_ROLES, frozenset({TokenKind.coord}), part_of)


def _token_term(weight: str, role: Role, kind: TokenKind) -> TermSpec:
    return TermSpec(weight, frozenset({role}), frozenset({kind}))


def _text_term(weight: str | None) -> TermSpec:
    return TermSpec(weight, TEXT_ROLES, TEXT_KINDS)


TOKEN_CE = ModuleKind(
    token_ce,
    {
        "struct_ce": _token_term("struct_ce_weight", Role.tail_structure, TokenKind.structure),
        "desc_ce": _token_term("desc_ce_weight", Role.tail_desc, TokenKind.desc),
        "eos_ce": _token_term("eos_ce_weight", Role.end_of_turn, TokenKind.end_of_turn),
    },
)
COORD_REG = ModuleKind(
    coord_reg,
    {name: _coord_term(f"{name}_weight") for name in ("coord_ce", "soft_ce", "w1", "coord_gate")}
    | {"text_gate": _text_term("text_gate_weight"), "soft_kl": _coord_term(None, part_of="soft_ce")},
)
NUMBER_CE = ModuleKind(number_ce, {"ce": _coord_term("ce_weight")})
CHAT_CE = ModuleKind(chat_ce, {"answer_ce": _token_term("answer_ce_weight", Role.answer, TokenKind.answer)})
BBOX_GEO = ModuleKind(bbox_geo, {name: _coord_term(f"{name}_weight") for name in ("smoothl1", "ciou")})
COORD_DIAG = ModuleKind(
    coord_diag,
    {name: _coord_term(None) for name in ("entropy", "top_probability", "target_probability", "coord_mass")}
    | {"text_coord_mass": _text_term(None)},
)
