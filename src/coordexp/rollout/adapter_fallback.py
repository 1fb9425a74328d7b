"""The choice between sending an adapter alone and sending whole weights, and why a run changed to whole
weights."""

from collections.abc import Callable
from typing import Any, Literal

from coordexp.config.rollout import Sync
from coordexp.errors import EngineError

# Why an adapter cannot be sent alone.
COORD_ROWS = (
    "since the rows of the coordinate tokens are trained beside it, and vLLM's LoRA has no place for them "
    "(model.adapter.train_coord_rows)"
)
WAYS_OUT = "set rollout_matching.vllm.sync.mode: full, or sync.fallback_to_full: true"


class AdapterRefused(EngineError):
    """The engine cannot use the adapter, but still takes whole weights."""


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
