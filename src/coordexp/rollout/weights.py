"""Weights on their way to an engine: which kind is sent, and whether they are finite. `servers.transfer` says how
they travel to a server."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from coordexp.config.rollout import Sync
from coordexp.errors import EngineError, UserError

ALIGNMENT = 256  # bytes; tensors in a buffer start at multiples of it, so that their dtypes can be read in place
DIVERGED = (
    "the training has diverged: start a new run with model.path at an earlier checkpoint and a lower "
    "training.learning_rate; weights with NaN or Inf are sent to no engine"
)
# Why an adapter cannot be sent alone.
COORD_ROWS = (
    "since the rows of the coordinate tokens are trained beside it, and vLLM's LoRA has no place for them "
    "(model.adapter.train_coord_rows)"
)
WAYS_OUT = "set rollout_matching.vllm.sync.mode: full, or sync.fallback_to_full: true"


class SyncMode:
    """The kind of weights that is sent after each update. It changes at most once, from the adapter to whole
    weights.

    `has_adapter` says that the adapter contains everything that is trained. `otherwise` ends the message to a run
    that may not fall back."""

    def __init__(self, sync: Sync, has_adapter: bool, notify: Callable[[str], None], otherwise: str) -> None:
        self.sync, self.notify, self.otherwise = sync, notify, otherwise
        self.mode: Literal["full", "adapter"] = "adapter" if sync.mode == "adapter" else "full"
        self.fallbacks: list[str] = []
        if self.mode == "adapter" and not has_adapter:
            problem = f"rollout_matching.vllm.sync.mode: an adapter alone cannot be sent, {COORD_ROWS}"
            self.fall_back(problem, "the whole merged weights are sent instead")

    @property
    def is_adapter(self) -> bool:
        return self.mode == "adapter"

    def fall_back(self, reason: str, consequence: str = "whole weights are sent from here on") -> None:
        """Change to whole weights for good, with a warning. Raise EngineError if the settings do not allow it."""
        if not self.sync.fallback_to_full:
            raise EngineError(reason, f"{WAYS_OUT}, {self.otherwise}")
        self.mode = "full"
        warning = f"warning: {reason}; {consequence}"
        self.fallbacks.append(warning)
        self.notify(warning)

    def describe(self) -> dict[str, Any]:
        """Return the facts that the run's manifest records."""
        return {"sync_mode": self.mode, "fallbacks": list(self.fallbacks)}


def find_non_finite(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first weight that has a NaN or an Inf, or None.

    The minimum and maximum of a tensor take one pass over it and no temporary copy; a NaN becomes both of them.
    The host waits for the device once, for all given weights."""
    names: list[str] = []
    extremes: list[Tensor] = []
    packed = getattr(torch, "float4_e2m1fn_x2", None)  # the 4-bit dtype has neither NaN nor Inf
    for name, weight in weights:
        if weight.numel() and weight.dtype.is_floating_point and weight.dtype is not packed:
            names.append(name)
            comparable = weight.detach().float() if weight.dtype.itemsize == 1 else weight.detach()
            extremes.append(torch.stack(torch.aminmax(comparable)).double())
    if not names:
        return None
    if len({pair.device for pair in extremes}) > 1:
        extremes = [pair.cpu() for pair in extremes]
    finite = torch.stack(extremes).isfinite().all(dim=1).tolist()
    return next((name for name, is_finite in zip(names, finite, strict=True) if not is_finite), None)


def check_finite(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise UserError if a weight has a NaN or an Inf."""
    if (name := find_non_finite(weights)) is not None:
        raise UserError(f"{name} has NaN or Inf values, and was not loaded", DIVERGED)


def align_size(nbytes: int) -> int:
    """Return the number of bytes that a tensor takes in a buffer, including the padding behind it."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
