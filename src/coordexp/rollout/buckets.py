"""Weights in portions of a size that fits a buffer, and the check that they are finite."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from coordexp.errors import EngineError
from coordexp.rollout.memory_file import ALIGNMENT

BUCKET_BYTES = 64 * 2**20
Bucket = list[tuple[str, Tensor]]
DIVERGED = (
    "the training has diverged: resume from a checkpoint before that with a lower training.learning_rate; "
    "weights with NaN or Inf are sent to no engine"
)


def buckets(weights: Iterator[tuple[str, Tensor]], size: int) -> Iterator[Bucket]:
    """In their order. One has more than `size` bytes only if its only tensor has."""
    bucket: Bucket = []
    room = size
    for name, weight in weights:
        if bucket and weight.nbytes > room:
            yield bucket
            bucket, room = [], size
        bucket.append((name, weight))
        room -= weight.nbytes + ALIGNMENT
    if bucket:
        yield bucket


def non_finite(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first weight that has a NaN or an Inf, or None.

    Minimum and maximum of a tensor are one pass over it without a temporary copy, and a NaN becomes both of them.
    The host waits for the device once, for all weights that are given."""
    names: list[str] = []
    extremes: list[Tensor] = []
    for name, weight in weights:
        if weight.numel() and can_be_non_finite(weight.dtype):
            names.append(name)
            comparable = weight.detach().float() if weight.dtype.itemsize == 1 else weight.detach()
            extremes.append(torch.stack(torch.aminmax(comparable)).double())
    if not names:
        return None
    if len({one.device for one in extremes}) > 1:
        extremes = [one.cpu() for one in extremes]
    finite = torch.stack(extremes).isfinite().all(dim=1).tolist()
    return next((name for name, is_finite in zip(names, finite, strict=True) if not is_finite), None)


def can_be_non_finite(dtype: torch.dtype) -> bool:
    """Return True for floating-point dtypes but the packed 4-bit one, which has neither NaN nor Inf."""
    return dtype.is_floating_point and dtype is not getattr(torch, "float4_e2m1fn_x2", None)


def check_finite(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if a weight has a NaN or an Inf."""
    if (name := non_finite(weights)) is not None:
        raise ValueError(f"{name} has NaN or Inf values, and was not loaded\n  {DIVERGED}")


def not_sent(name: str) -> EngineError:
    """Return the error of a learner whose weights are not finite."""
    return EngineError(f"the learner's weights were not sent: {name} has NaN or Inf values\n  {DIVERGED}")
