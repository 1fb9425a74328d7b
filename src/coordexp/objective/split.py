"""Split the probability mass of the full vocabulary into coordinate tokens and text tokens.

This is the only place that reads full-vocabulary logits. Every loss and every diagnostic uses a
`VocabularySplit`, so they can never disagree about the treatment of extreme values: NaN counts as 0, everything
else is clamped to +-FENCE, and only then divided by the temperature. The log masses of the two parts are kept
separate. Their difference is exact even if one part has nearly all of the mass, whereas log(1 - p) would not be.
The split is a single autograd function, because it then needs two passes over the logits and no copy of them.
`torch.logsumexp` on slices would need five copies.

Many logits are never in memory at once: `SplittingHead` makes the vocabulary projection of a model return the
split in place of the logits, computed in chunks of positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from coordexp.data import BINS

FENCE = 1e4
_CHUNK = 1 << 20  # logits per chunk: a few megabytes, which fit in the cache of a CPU; a GPU takes larger ones
# Logits that the vocabulary projection computes at once: 220 positions of Qwen's vocabulary, 64 MB in bfloat16.
PROJECTED = 1 << 25


@dataclass(frozen=True)
class VocabularySplit:
    """The split logits of each position.

    `coord` has the logits of the coordinate tokens (no columns if the model has none), `target` the logit of the
    token that follows, and `log_text` the log mass of all text tokens. All are clamped, divided by the
    temperature, and relative to the largest logit of the position, so only differences are meaningful. `broken`
    counts the logits of the position that were NaN or outside the fence.
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
        return VocabularySplit(**{field.name: getattr(self, field.name)[mask] for field in fields(self)})


@dataclass(frozen=True)
class SplitRequest:
    """A request to split logits. `ids` are the tokens that follow the positions. `first_coord` is the id of bin
    0, or None if the model has no coordinate tokens. The first of the temperatures is 1."""

    ids: Tensor
    first_coord: int | None
    temperatures: tuple[float, ...]


class Split:
    """The split logits of a row, for the modules of an objective. They are one tensor, [positions, columns],
    that a model can return in place of the logits. The columns are the two named below, then the log mass of
    text tokens at each temperature, then the coordinate tokens, if the model has them."""

    TARGET, BROKEN, LOG_TEXT = range(3)

    def __init__(self, columns: Tensor, temperatures: tuple[float, ...]) -> None:
        self.columns, self.temperatures = columns, temperatures

    @classmethod
    def of_logits(cls, logits: Tensor, request: SplitRequest, sums: "dict[float, Sums] | None" = None) -> "Split":
        """Split logits of shape [positions, vocabulary]. `sums` has their sums by temperature, or gets them."""
        if len(logits) != len(request.ids):
            raise ValueError(f"{len(logits)} rows of logits for {len(request.ids)} supervised positions")
        splits = [
            split_vocabulary(logits, request.ids, request.first_coord, temperature, sums)
            for temperature in request.temperatures
        ]
        coord, target, broken = splits[0].coord, splits[0].target, splits[0].broken
        others = (target, broken.to(target), *(split.log_text for split in splits))
        return cls(torch.cat((torch.stack(others, 1), coord), 1), request.temperatures)

    def __call__(self, temperature: float) -> VocabularySplit:
        """Return the split of all positions at a temperature: 1, or that of a module of the objective."""
        if temperature not in self.temperatures:
            known = ", ".join(map(str, self.temperatures))
            raise ValueError(
                f"the logits were split at the temperatures {known}, not at {temperature}: the config of a module "
                "states its temperature in a field of that name"
            )
        log_text = self.columns[:, self.LOG_TEXT + self.temperatures.index(temperature)]
        coord, target = self.columns[:, self.LOG_TEXT + len(self.temperatures) :], self.columns[:, self.TARGET]
        if temperature != 1.0:
            coord, target = coord / temperature, target / temperature
        return VocabularySplit(coord, target, log_text, self.columns[:, self.BROKEN].detach())

    def at(self, positions: slice | Tensor) -> "Split":
        return Split(self.columns[positions], self.temperatures)


class SplittingHead:
    """The vocabulary projection of a model, which returns the columns of a `Split` while one is requested.

    The logits are computed in chunks of positions, split, dropped, and computed again in the backward pass. Their
    sums are kept. If they fit in one chunk, they are kept and not computed twice. All of this is inside the
    forward pass of the model, so DDP, FSDP and autocast treat the projection as they do without it."""

    def __init__(self, model: Any) -> None:
        self._head = model.get_output_embeddings()
        self._vocabulary = model.config.get_text_config().vocab_size
        self._project = self._head.forward
        self._request: SplitRequest | None = None
        self._head.forward = self._forward

    @contextmanager
    def splitting(self, request: SplitRequest) -> Iterator[None]:
        """Make forward passes return split logits instead of logits."""
        self._request = request
        try:
            yield
        finally:
            self._request = None

    def _forward(self, hidden: Tensor) -> Tensor:
        request = self._request
        if request is None:
            return self._project(hidden)
        (positions,) = hidden  # a row is alone in its batch
        size = max(1, PROJECTED // self._vocabulary)
        if len(positions) <= size:
            return self._split(positions, request)[None]
        chunks = [slice(start, start + size) for start in range(0, len(positions), size)]
        parts = [
            checkpoint(self._split, positions[at], replace(request, ids=request.ids[at]), {}, use_reentrant=False)
            for at in chunks
        ]
        return torch.cat(parts)[None]

    def _split(self, hidden: Tensor, request: SplitRequest, sums: "dict[float, Sums] | None" = None) -> Tensor:
        return Split.of_logits(self._project(hidden), request, sums).columns


class Sums(NamedTuple):
    """The results of all passes over the vocabulary: for each position, the log mass of the text tokens, the
    largest logit and the number of broken logits, and whether none is broken anywhere."""

    log_text: Tensor
    largest: Tensor
    broken: Tensor
    is_clean: bool


def split_vocabulary(
    logits: Tensor,
    ids: Tensor,
    first_coord: int | None,
    temperature: float = 1.0,
    sums: dict[float, Sums] | None = None,
) -> VocabularySplit:
    """Split `logits`, which are [positions, vocabulary]. `ids` are the tokens that follow each position. `sums`
    has their sums by temperature, or gets them."""
    size = logits.shape[1]
    coords = slice(size, size) if first_coord is None else slice(first_coord, first_coord + BINS)
    sums = {} if sums is None else sums
    if temperature not in sums:
        sums[temperature] = _sum_up(logits.detach(), coords, temperature)
    of_logits = sums[temperature]
    coord, target, log_text = _Split.apply(logits, ids, coords, temperature, of_logits)
    return VocabularySplit(coord, target, log_text, of_logits.broken)


def _sum_up(logits: Tensor, coords: slice, temperature: float) -> Sums:
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_text, largest = (logits.new_empty(len(logits), dtype=wide) for _ in range(2))
    broken, is_clean = logits.new_zeros(len(logits), dtype=torch.int64), True
    for rows in _chunks(logits):
        part = logits[rows].to(wide)
        if not _is_clean(part):
            is_clean = False
            broken[rows] = _outside(part).count_nonzero(-1)
            part = _clamp(part, is_clean=False)
        part = part if temperature == 1.0 else part / temperature
        before, top_before = _log_sum(part[:, : coords.start])
        behind, top_behind = _log_sum(part[:, coords.stop :])
        torch.logaddexp(before, behind, out=log_text[rows])
        torch.maximum(top_before, top_behind, out=largest[rows])
        if coords.start < coords.stop:
            largest[rows] = torch.maximum(largest[rows], part[:, coords].amax(-1))
    return Sums(log_text, largest, broken, is_clean)


def _log_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `logsumexp(-1)` returns, bit for bit, and the largest logit of each position, which it needs
    anyway. The logits are clean. Without a logit, both are minus infinity."""
    if not logits.shape[1]:
        nothing = logits.new_full((len(logits),), -torch.inf)
        return nothing, nothing
    top = logits.amax(-1, keepdim=True)
    return (logits - top).exp_().sum(-1).log_().add_(top[:, 0]), top[:, 0]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, coords: slice, temperature: float, sums: Sums
    ) -> tuple[Tensor, ...]:
        log_text, largest, _, is_clean = sums
        coord = _clamp(logits[:, coords], is_clean) / temperature
        target = _clamp(logits.gather(1, ids[:, None])[:, 0], is_clean) / temperature
        ctx.save_for_backward(logits, ids, log_text)
        ctx.settings = coords, temperature, is_clean
        return coord - largest[:, None], target - largest, log_text - largest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        of_coord, of_target, of_log_text = gradients
        logits, ids, log_text = ctx.saved_tensors
        coords, temperature, is_clean = ctx.settings
        gradient = torch.empty_like(logits)
        for rows in _chunks(logits):
            part = _clamp(logits[rows], is_clean)
            part = part if temperature == 1.0 else part / temperature
            is_in_place = part.dtype == gradient.dtype
            part = torch.sub(part, log_text[rows, None], out=gradient[rows] if is_in_place else None)
            part.exp_().mul_(of_log_text[rows, None])
            part[:, coords] = of_coord[rows]
            part.scatter_add_(1, ids[rows, None], of_target[rows, None])
            if temperature != 1.0:
                part /= temperature
            if not is_clean:
                part.masked_fill_(_outside(logits[rows]), 0.0)
            if not is_in_place:
                gradient[rows] = part
        return gradient, None, None, None, None


def _is_clean(logits: Tensor) -> bool:
    """Return whether every logit is inside the fence. This check is cheap and saves two passes."""
    if not logits.numel():
        return True
    low, high = torch.aminmax(logits)
    return bool((low >= -FENCE) & (high <= FENCE))


def _outside(logits: Tensor) -> Tensor:
    return ~(logits.abs() <= FENCE)


def _clamp(logits: Tensor, is_clean: bool) -> Tensor:
    """Return the logits with NaN as 0 and the others clamped, as float64 if they are, else as float32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if is_clean else wide.clamp(-FENCE, FENCE).nan_to_num_(0.0)


def _chunks(logits: Tensor) -> list[slice]:
    step = max(1, (_CHUNK * 64 if logits.is_cuda else _CHUNK) // logits.shape[1])
    return [slice(start, start + step) for start in range(0, len(logits), step)]
