"""Small supervision streams for tests of the objective, and a vocabulary of 1,010 tokens with coordinates at 5."""

from typing import Any

import torch

from coordexp.answers.segment import Role
from coordexp.config.sections import OWN
from coordexp.extensions import resolve_part
from coordexp.objective.collate import Supervision
from coordexp.objective.split import Split, SplitRequest

MODULES = {name: resolve_part(settings.kind) for name, settings in OWN.items()}
FIRST = 5
SIZE = 1010


def supervision(*entries: tuple[Role, float | int], channels: str | None = None) -> Supervision:
    """Return the supervision of these positions. An entry is a coordinate role with its target bin, or a
    text role with its token id."""
    coord = [role in (Role.matched_coord, Role.tail_coord) for role, _ in entries]
    sides, box = [], 0
    for is_coord in coord:
        sides.append(box % 4 + 1 if is_coord else 0)
        box += is_coord
    return Supervision(
        ids=torch.tensor([FIRST + round(v) if c else int(v) for (_, v), c in zip(entries, coord, strict=True)]),
        roles=torch.tensor([int(role) for role, _ in entries], dtype=torch.int8),
        sides=torch.tensor(sides, dtype=torch.int8),
        coord_targets=torch.tensor(
            [float(v) if c else float("nan") for (_, v), c in zip(entries, coord, strict=True)]
        ),
        weights=torch.ones(len(entries)),
        channels=torch.tensor(["AB".index(c) for c in channels or "B" * len(entries)], dtype=torch.int8),
    )


MIXED = supervision(
    (Role.matched_coord, 10.25),
    (Role.matched_coord, 200.5),
    (Role.matched_coord, 400.0),
    (Role.matched_coord, 700.75),
    (Role.tail_structure, 2),
    (Role.tail_desc, 3),
    (Role.tail_coord, 0),
    (Role.tail_structure, 1007),
    (Role.tail_coord, 100),
    (Role.tail_coord, 999),
    (Role.tail_coord, 998),
    (Role.end_of_turn, 4),
)


def random_logits(count: int = len(MIXED.ids), *, seed: int = 0, dtype: Any = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, SIZE, generator=generator, dtype=torch.float64) * 3).to(dtype)


TEMPERATURES = (1.0, 1.5, 2.0)


def splitter(logits: torch.Tensor, s: Supervision) -> Split:
    return Split.of_logits(logits, SplitRequest(s.ids, FIRST, TEMPERATURES))
