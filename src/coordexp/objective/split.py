"""The one place that reads full-vocabulary logits: how much goes to coordinates, how much to text (R38).

Every loss and every diagnostic takes what it needs from a `VocabularySplit`, so the numeric fences (what is not a
number counts as 0, everything is clamped to +-FENCE, temperature divides after that) are the same for all of them.
The two log masses are kept apart: their difference is exact also where one of them is nearly everything, which
log(1 - p) is not. Written as one autograd function because it then needs two passes over the logits and no copy of
them; `torch.logsumexp` on slices needs five of their size.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from coordexp.data import BINS

FENCE = 1e4
_CHUNK = 1 << 20  # logits handled at once: some megabytes, which stay in a processor's cache; more on a GPU


@dataclass(frozen=True)
class VocabularySplit:
    """For each position: fenced logits of the coordinate tokens and of the token that follows, and the log mass of
    all other tokens. They are divided by the temperature, and relative to the largest of the position: only
    differences mean anything. `broken` counts the logits that were outside of the fence."""

    coord: Tensor
    target: Tensor
    log_text: Tensor
    broken: Tensor

    @property
    def log_coord(self) -> Tensor:
        return self.coord.logsumexp(-1)

    def cross_entropy(self) -> Tensor:
        """Of the token that follows, over the full vocabulary."""
        return torch.logaddexp(self.log_coord, self.log_text) - self.target

    def coord_gate(self) -> Tensor:
        """-log of the mass on coordinate tokens: what a coordinate position pays for leaking to text."""
        return softplus(self.log_text - self.log_coord)

    def text_gate(self) -> Tensor:
        """-log of the mass on everything else: what a text position pays for leaking to coordinates."""
        return softplus(self.log_coord - self.log_text)

    def coord_mass(self) -> Tensor:
        return torch.sigmoid(self.log_coord - self.log_text)

    def where(self, mask: Tensor) -> "VocabularySplit":
        """The positions in `mask`."""
        parts = {field.name: getattr(self, field.name)[mask] for field in fields(self) if field.name != "broken"}
        return VocabularySplit(**parts, broken=self.broken)


def split_vocabulary(logits: Tensor, ids: Tensor, first_coord: int, temperature: float = 1.0) -> VocabularySplit:
    """`logits` is [positions, vocabulary], `ids` the token that follows each position."""
    return VocabularySplit(*_Split.apply(logits, ids, first_coord, temperature))


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, first: int, temperature: float) -> tuple[Tensor, ...]:
        clean = _is_clean(logits)
        broken = logits.new_zeros((), dtype=torch.int64)
        coord = _fenced(logits[:, first : first + BINS], clean) / temperature
        target = _fenced(logits.gather(1, ids[:, None])[:, 0], clean) / temperature
        log_text, largest = target.new_empty(len(logits)), target.new_empty(len(logits))
        for rows in _chunks(logits):
            if not clean:
                broken += _outside(logits[rows]).count_nonzero()
            scaled = _fenced(logits[rows], clean)
            scaled = scaled if temperature == 1.0 else scaled / temperature
            parts = scaled[:, :first].logsumexp(-1), scaled[:, first + BINS :].logsumexp(-1)
            torch.logaddexp(*parts, out=log_text[rows])
            torch.amax(scaled, -1, out=largest[rows])
        ctx.save_for_backward(logits, ids, log_text)
        ctx.settings = first, temperature, clean
        ctx.mark_non_differentiable(broken)
        return coord - largest[:, None], target - largest, log_text - largest, broken

    @staticmethod
    def backward(ctx: Any, *of: Tensor) -> tuple[Tensor, None, None, None]:
        of_coord, of_target, of_log_text, _ = of
        logits, ids, log_text = ctx.saved_tensors
        first, temperature, clean = ctx.settings
        gradient = torch.empty_like(logits)
        for rows in _chunks(logits):
            part = _fenced(logits[rows], clean, copy=True)
            if temperature != 1.0:
                part /= temperature
            part -= log_text[rows, None]
            part.exp_().mul_(of_log_text[rows, None])
            part[:, first : first + BINS] = of_coord[rows]
            part.scatter_add_(1, ids[rows, None], of_target[rows, None])
            if temperature != 1.0:
                part /= temperature
            if not clean:
                part.masked_fill_(_outside(logits[rows]), 0.0)
            gradient[rows] = part
        return gradient, None, None, None


def _is_clean(logits: Tensor) -> bool:
    """Whether every logit is a number inside of the fence: one cheap look, which spares two passes."""
    if not logits.numel():
        return True
    low, high = torch.aminmax(logits)
    return bool((low >= -FENCE) & (high <= FENCE))


def _outside(logits: Tensor) -> Tensor:
    return ~(logits.abs() <= FENCE)


def _fenced(logits: Tensor, clean: bool, copy: bool = False) -> Tensor:
    """In float32, or float64 if they are; without a copy where none is needed and none is asked for."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=copy)
    return wide if clean else wide.clamp(-FENCE, FENCE).nan_to_num_(0.0)


def _chunks(logits: Tensor) -> list[slice]:
    step = max(1, (_CHUNK * 64 if logits.is_cuda else _CHUNK) // logits.shape[1])
    return [slice(start, start + step) for start in range(0, len(logits), step)]
