"""Split the probability mass of the full vocabulary into coordinate tokens and text tokens.

This is the only place that reads full-vocabulary logits. Every loss and every diagnostic uses a
`VocabularySplit`, so they can never disagree about the treatment of extreme values: NaN counts as 0, everything
else is clamped to +-FENCE, and only then divided by the temperature. The log masses of the two parts are kept
separate. Their difference is exact even if one part has nearly all of the mass, whereas log(1 - p) would not be.
The split is a single autograd function, because it then needs two passes over the logits and no copy of them.
`torch.logsumexp` on slices would need five copies.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from coordexp.data import BINS

FENCE = 1e4
_CHUNK = 1 << 20  # logits per chunk: a few megabytes, which fit in the cache of a CPU; a GPU takes larger ones


@dataclass(frozen=True)
class VocabularySplit:
    """The split logits of each position.

    `coord` has the logits of the coordinate tokens, `target` the logit of the token that follows, and `log_text`
    the log mass of all text tokens. All are clamped, divided by the temperature, and relative to the largest
    logit of the position, so only differences are meaningful. `broken` counts the logits that were NaN or
    outside the fence.
    """

    coord: Tensor
    target: Tensor
    log_text: Tensor
    broken: Tensor

    @property
    def log_coord(self) -> Tensor:
        return self.coord.logsumexp(-1)

    def cross_entropy(self) -> Tensor:
        """Return the cross entropy of the token that follows, over the full vocabulary."""
        return torch.logaddexp(self.log_coord, self.log_text) - self.target

    def coord_gate(self) -> Tensor:
        """Return -log of the mass on coordinate tokens: the loss of a coordinate position whose mass leaks to
        text."""
        return softplus(self.log_text - self.log_coord)

    def text_gate(self) -> Tensor:
        """Return -log of the mass on text tokens: the loss of a text position whose mass leaks to coordinates."""
        return softplus(self.log_coord - self.log_text)

    def coord_mass(self) -> Tensor:
        return torch.sigmoid(self.log_coord - self.log_text)

    def where(self, mask: Tensor) -> "VocabularySplit":
        """Return the split of the positions in `mask`."""
        parts = {field.name: getattr(self, field.name)[mask] for field in fields(self) if field.name != "broken"}
        return VocabularySplit(**parts, broken=self.broken)


def split_vocabulary(logits: Tensor, ids: Tensor, first_coord: int, temperature: float = 1.0) -> VocabularySplit:
    """Split `logits`, which are [positions, vocabulary]. `ids` are the tokens that follow each position."""
    return VocabularySplit(*_Split.apply(logits, ids, first_coord, temperature))


def unlikelihood(logits: Tensor, ids: Tensor) -> Tensor:
    """Return -log(1 - p) of the tokens `ids`, one for each row of `logits`. It compares each token with all
    others, so it is exact, and has a gradient, even if the model is certain of the token."""
    clean = _clamp(logits, clean=False)
    chosen = clean.gather(1, ids[:, None])[:, 0]
    others = clean.scatter(1, ids[:, None], -torch.inf).logsumexp(-1)
    return softplus(chosen - others)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, first: int, temperature: float) -> tuple[Tensor, ...]:
        clean = _is_clean(logits)
        broken = logits.new_zeros((), dtype=torch.int64)
        coord = _clamp(logits[:, first : first + BINS], clean) / temperature
        target = _clamp(logits.gather(1, ids[:, None])[:, 0], clean) / temperature
        log_text, largest = target.new_empty(len(logits)), target.new_empty(len(logits))
        for rows in _chunks(logits):
            if not clean:
                broken += _outside(logits[rows]).count_nonzero()
            scaled = _clamp(logits[rows], clean)
            scaled = scaled if temperature == 1.0 else scaled / temperature
            parts = scaled[:, :first].logsumexp(-1), scaled[:, first + BINS :].logsumexp(-1)
            torch.logaddexp(*parts, out=log_text[rows])
            torch.amax(scaled, -1, out=largest[rows])
        ctx.save_for_backward(logits, ids, log_text)
        ctx.settings = first, temperature, clean
        ctx.mark_non_differentiable(broken)
        return coord - largest[:, None], target - largest, log_text - largest, broken

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        of_coord, of_target, of_log_text, _ = gradients
        logits, ids, log_text = ctx.saved_tensors
        first, temperature, clean = ctx.settings
        gradient = torch.empty_like(logits)
        for rows in _chunks(logits):
            part = _clamp(logits[rows], clean, copy=True)
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
    """Return whether every logit is inside the fence. This check is cheap and saves two passes."""
    if not logits.numel():
        return True
    low, high = torch.aminmax(logits)
    return bool((low >= -FENCE) & (high <= FENCE))


def _outside(logits: Tensor) -> Tensor:
    return ~(logits.abs() <= FENCE)


def _clamp(logits: Tensor, clean: bool, copy: bool = False) -> Tensor:
    """Return the logits with NaN as 0 and the others clamped, as float64 if they are, else as float32. They are
    copied only if that is necessary or `copy` is set."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=copy)
    return wide if clean else wide.clamp(-FENCE, FENCE).nan_to_num_(0.0)


def _chunks(logits: Tensor) -> list[slice]:
    step = max(1, (_CHUNK * 64 if logits.is_cuda else _CHUNK) // logits.shape[1])
    return [slice(start, start + step) for start in range(0, len(logits), step)]
