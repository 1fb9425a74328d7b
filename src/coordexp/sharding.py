"""How a model's weights are shared out over ranks, and the refusal of the ways that rollouts cannot work with."""

from typing import Any

from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from coordexp.errors import EngineError


def is_sharded(model: Any) -> bool:
    """By FSDP2. What others share out cannot answer, since forwards would have to be counted on all ranks, nor
    be sent to an engine, since no weight is whole under its own name."""
    flat = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    if flat or any(hasattr(weight, "ds_id") for weight in model.parameters()):
        how = "FSDP version 1" if flat else "ZeRO stage 3"
        raise EngineError(
            f"there are no rollouts of a model that is sharded by {how}\n"
            "  use FSDP2 (training.fsdp_config: {version: 2}), ZeRO up to stage 2, or DDP"
        )
    return dist.is_initialized() and any(isinstance(weight, DTensor) for weight in model.parameters())
