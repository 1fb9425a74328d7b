"""What a run is told that asks for adapters to be sent alone (R07)."""

from coordexp.config.rollout import Sync
from coordexp.errors import EngineError
from coordexp.rollout.installed import OTHERWISE

# Why an adapter cannot be sent alone.
COORD_ROWS = (
    "since the rows of the coordinate tokens are trained beside it, and vLLM's LoRA has no place for them "
    "(model.adapter.train_coord_rows)"
)
COLOCATED = "since an engine beside the learner gets whole weights, by memory that both see"


def instead_of_adapters(sync: Sync, because: str) -> str | None:
    """What to say to a run that asks for adapters to be sent alone, which cannot be."""
    if sync.mode != "adapter":
        return None
    why = f"rollout_matching.vllm.sync.mode: an adapter alone cannot be sent, {because}"
    if not sync.fallback_to_full:
        raise EngineError(f"{why}\n  set sync.mode: full, or sync.fallback_to_full: true, {OTHERWISE}")
    return f"warning: {why}; the whole merged weights are sent instead"
