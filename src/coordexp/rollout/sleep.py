"""The memory of a colocated engine: it is held while the engine is used, and free while the learner trains.

vLLM can sleep in two ways. At level 1 the weights are copied to host memory, and at level 2 they are dropped.
Level 2 would be enough for a run that sends all weights at every step, but it also drops tensors that no sync
sends: vLLM's Qwen3-VL adds `deepstack_input_embeds` to the hidden states of every token, expects zeros there where
no image is, and keeps them in plain tensors beside the weights, which a wake-up from level 2 does not restore. So
the engine sleeps at level 1. It then has its weights after every wake-up, with or without a sync.

Never run so far on a GPU; on a CPU, vLLM accepts these calls, and frees nothing.
"""

from collections.abc import Callable
from typing import Any, Literal

LEVEL = 1


class EngineMemory:
    """Puts an engine to sleep and wakes it up. Without `sleeps`, the engine is always awake.

    The memory of the weights comes back first, and that of the KV cache only when the new weights have arrived,
    because a sync needs memory of its own. `clear_kv_cache` sets the KV cache to 0."""

    def __init__(self, engine: Any, sleeps: bool, clear_kv_cache: Callable[[], None]) -> None:
        self._engine, self._sleeps, self._clear_kv_cache = engine, sleeps, clear_kv_cache
        self.state: Literal["awake", "only weights", "asleep"] = "awake"

    def wake_for_weights(self) -> None:
        """Return once the engine can load weights."""
        if self.state == "asleep":
            self._engine.wake_up(["weights"])
            self.state = "only weights"

    def wake(self) -> None:
        """Return once the engine can generate. The KV cache is new memory with unknown contents, which could be
        NaN."""
        self.wake_for_weights()
        if self.state == "only weights":
            self._engine.wake_up(["kv_cache"])
            self._clear_kv_cache()
            self.state = "awake"

    def sleep(self) -> None:
        """Free the engine's memory, if the settings say so. No request may be running."""
        if not self._sleeps or self.state == "asleep":
            return
        self.wake()  # vLLM does not put a half-awake engine to sleep
        self._engine.sleep(level=LEVEL)
        self.state = "asleep"
