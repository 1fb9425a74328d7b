"""The learner's model and optimizer leave memory while a colocated engine answers.

Meanwhile modules hold stand-ins to read from: a parameter that moved to another device by itself would be cut off
from the hooks by which DDP adds up gradients. Afterwards everything is the object, and the bits, that it was.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from coordexp.config.rollout import Offload
from coordexp.errors import EngineError
from coordexp.train.spill import Away, gone


@contextmanager
def offloaded(settings: Offload, model: nn.Module, optimizer: Any, folder: Path) -> Iterator[Away]:
    """Without model and optimizer in memory, as far as the settings ask for it. Inside, the model is there to be
    read, module by module. A learner on the CPU goes to a file in `folder`."""
    if not settings.enabled:
        yield Away()
        return
    check_offload(settings, model, optimizer)
    tensors: list[Tensor] = []
    if settings.offload_model:
        for module in model.modules():
            if isinstance(module, FSDPModule):  # the shards, not what a forward has gathered
                module.reshard()
        tensors += _of_model(model)
    if settings.offload_optimizer:
        tensors += _of_optimizer(optimizer)
    with gone(tensors, folder) as away, _stand_ins(model, away), torch.no_grad():
        yield away


def check_offload(settings: Offload, model: nn.Module, optimizer: Any) -> None:
    """Refuses what would not come back as it was. `optimizer` is None until there is one."""
    if not settings.enabled:
        return
    flat = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    if settings.offload_model and (flat or any(hasattr(weight, "ds_id") for weight in model.parameters())):
        how = "FSDP version 1" if flat else "ZeRO stage 3"
        raise EngineError(
            f"rollout_matching.offload.offload_model: {how} moves the model's memory by itself\n"
            "  use FSDP2 (training.fsdp_config: {version: 2}), ZeRO up to stage 2, or DDP"
        )
    if settings.offload_optimizer and _is_deepspeed(optimizer):
        raise EngineError(
            "rollout_matching.offload.offload_optimizer: DeepSpeed's optimizer has memory that is out of reach\n"
            "  set offload_optimizer: false, let DeepSpeed do it (zero_optimization: {offload_optimizer: {device: "
            "cpu}}), train with FSDP2 or DDP, or set rollout_backend: hf"
        )


def _of_model(model: nn.Module) -> list[Tensor]:
    weights = list(model.parameters())
    grads = [weight.grad for weight in weights if weight.grad is not None]
    return [*weights, *model.buffers(), *grads]


def _of_optimizer(optimizer: Any) -> list[Tensor]:
    slots = [] if optimizer is None else optimizer.state.values()
    return [value for slot in slots for value in slot.values() if isinstance(value, Tensor)]


def _is_deepspeed(optimizer: Any) -> bool:
    while optimizer is not None:
        if any(kind.__module__.split(".")[0] == "deepspeed" for kind in type(optimizer).__mro__):
            return True
        optimizer = getattr(optimizer, "optimizer", None)  # below accelerate's
    return False


@contextmanager
def _stand_ins(model: nn.Module, away: Away) -> Iterator[None]:
    """In place of every parameter and buffer that has gone, one to read; the same for tied ones."""
    held: dict[int, Tensor] = {}
    with ExitStack() as back:
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None and tensor in away:
                        back.callback(table.__setitem__, name, tensor)
                        table[name] = held.setdefault(id(tensor), _like(tensor, away))
        yield


def _like(tensor: Tensor, away: Away) -> Tensor:
    view = away.view(tensor)
    return nn.Parameter(view, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else view
