"""Offloading: move the learner's model and optimizer out of device memory while an engine on the same device
generates.

Memory is moved storage by storage to host memory, so tensors that share one still do afterwards. Meanwhile,
modules hold stand-in parameters to read from: a parameter that moved to another device by itself would lose the
hooks through which DDP reduces gradients. Afterwards every tensor is the same object with the same bits. A learner
on the CPU is moved in the same way, which frees nothing, so that all of this can be tested without a GPU.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from coordexp.config.rollout import Offload
from coordexp.errors import EngineError, explain

SMALL = 1024  # storages with fewer bytes stay
Copies = dict[int, UntypedStorage]  # of the storages that are offloaded, by their addresses


@contextmanager
def offload_learner(settings: Offload, model: nn.Module, optimizer: Any) -> Iterator[None]:
    """Offload model and optimizer, as the settings say, until the end of the block. Inside, the model can be
    read module by module."""
    if not settings.enabled:
        yield
        return
    check_offload(settings, model)
    tensors: list[Tensor] = []
    if settings.offload_model:
        for module in model.modules():
            if isinstance(module, FSDPModule):  # offload the shards, not what a forward pass has gathered
                module.reshard()
        weights = list(model.parameters())
        tensors += [*weights, *model.buffers(), *(weight.grad for weight in weights if weight.grad is not None)]
    if settings.offload_optimizer and optimizer is not None:
        tensors += [
            value for slot in optimizer.state.values() for value in slot.values() if isinstance(value, Tensor)
        ]
    with offload_storages(tensors) as copies, _use_stand_ins(model, copies), torch.no_grad():
        yield


def check_offload(settings: Offload, model: nn.Module) -> None:
    """Raise EngineError for a learner that could not be restored."""
    is_flat = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    if settings.enabled and settings.offload_model and is_flat:
        raise EngineError(
            "rollout_matching.offload.offload_model: FSDP version 1 moves the model's memory itself",
            "use FSDP2 (training.fsdp_config: {version: 2}) or DDP",
        )


@contextmanager
def _use_stand_ins(model: nn.Module, copies: Copies) -> Iterator[None]:
    """Replace every offloaded parameter and buffer by one that can be read. Tied parameters share one stand-in."""
    stand_ins: dict[int, Tensor] = {}
    with ExitStack() as restore:
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None and to_local(tensor).untyped_storage()._cdata in copies:
                        restore.callback(table.__setitem__, name, tensor)
                        stand_in = _view_copy(tensor, copies)
                        if isinstance(tensor, nn.Parameter):
                            stand_in = nn.Parameter(stand_in, tensor.requires_grad)
                        table[name] = stand_ins.setdefault(id(tensor), stand_in)
        yield


@contextmanager
def offload_storages(tensors: Iterable[Tensor]) -> Iterator[Copies]:
    """Move the storages of these tensors away until the end of the block. Inside, read a tensor through
    `_view_copy` only: reading it directly would crash the process."""
    groups, copies = _group_by_storage(tensors), Copies()
    size = sum(group[0].untyped_storage().nbytes() for group in groups)
    problem = f"rollout_matching.offload: {size / 1e9:.3f} GB of the learner could not be offloaded"
    fix = "it needs that much host memory; or set rollout_matching.offload.enabled: false"
    with ExitStack() as restore:
        restore.callback(copies.clear)
        with explain(RuntimeError, problem, fix, to=EngineError):
            for group in groups:
                storage = _make_resizable(group)
                copy = _copy_to_host(storage)
                restore.callback(_copy_back, storage, copy)
                copies[storage._cdata] = copy
                storage.resize_(0)
        yield copies


def to_local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _group_by_storage(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors that are worth moving, grouped by storage. If any is on an accelerator, tensors on the
    CPU are left out, because they do not take memory from the engine."""
    by_storage: dict[int, dict[int, Tensor]] = {}
    for tensor in map(to_local, tensors):
        storage = tensor.untyped_storage()
        if storage.nbytes() >= SMALL and storage.data_ptr():
            by_storage.setdefault(storage._cdata, {})[id(tensor)] = tensor
    groups = [list(group.values()) for group in by_storage.values()]
    return [group for group in groups if group[0].device.type != "cpu"] or groups


def _copy_to_host(storage: UntypedStorage) -> UntypedStorage:
    is_pinned = storage.device.type != "cpu"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_pinned).untyped_storage()
    return copy.copy_(storage)


def _copy_back(storage: UntypedStorage, copy: UntypedStorage) -> None:
    storage.resize_(copy.nbytes())
    storage.copy_(copy)


def _make_resizable(group: list[Tensor]) -> UntypedStorage:
    """Return a storage of these tensors that can be resized. Memory that belongs to something else, such as the
    mapped file of a checkpoint, is copied once. Tensors outside the group that share it keep the old memory."""
    storage = group[0].untyped_storage()
    if storage.resizable():
        return storage
    own = storage.clone()
    for tensor in group:
        tensor.data = _view_storage(own, tensor)
    return own


def _view_copy(tensor: Tensor, copies: Copies) -> Tensor:
    """Return a tensor with the same values, over the copy of its storage."""
    local = to_local(tensor)
    copy = _view_storage(copies[local.untyped_storage()._cdata], local)
    return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy


def _view_storage(storage: UntypedStorage, like: Tensor) -> Tensor:
    """Return a tensor over `storage` with the dtype, offset, size and strides of another one."""
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())
