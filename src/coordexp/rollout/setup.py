"""What a learner and whoever answers for it must agree on."""

from dataclasses import dataclass
from pathlib import Path

import torch

from coordexp.config import RolloutMatching
from coordexp.vocab import VocabularyTable


@dataclass(frozen=True)
class Setup:
    """The checkpoint that the learner was, how it is served, and the device of the one that has this."""

    folder: Path
    dtype: str
    settings: RolloutMatching
    table: VocabularyTable
    device: torch.device
    precision: str = ""  # that the learner computes in, where it is not that of its weights

    @property
    def size(self) -> int:
        """Devices that share one engine."""
        return self.settings.vllm.tensor_parallel_size or 1

    @property
    def replicas(self) -> int:
        """Engines of one rollout server, each with all weights."""
        return self.settings.vllm.data_parallel_size

    @property
    def world_size(self) -> int:
        """Devices of one rollout server."""
        return self.settings.vllm.devices_per_server
