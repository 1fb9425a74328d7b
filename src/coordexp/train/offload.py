"""Offloading: move the learner's model and optimizer out of device memory while an engine on the same device
generates.

Memory is moved storage by storage, so tensors that share one still do afterwards. From the CPU a storage goes to a
file, from an accelerator to pinned host memory. Meanwhile, modules hold stand-in parameters to read from: a
parameter that moved to another device by itself would lose the hooks through which DDP reduces gradients.
Afterwards every tensor is the same object with the same bits.
"""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from coordexp.config.rollout import Offload
from coordexp.errors import EngineError, explain
from coordexp.rollout.weights import align_size

# Storages with fewer bytes stay, except storages inside a mapped file: one that stayed would keep the whole file
# mapped.
SMALL = 1024


class OffloadedStorages:
    """The storages that are offloaded, and their copies in another memory."""

    def __init__(self, target: "MappedFile | PinnedMemory | None" = None) -> None:
        self.target = target
        self.copies: dict[int, UntypedStorage] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return _to_local(tensor).untyped_storage()._cdata in self.copies

    def view(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the same values, over the copy of its storage."""
        local = _to_local(tensor)
        copy = _view_storage(self.copies[local.untyped_storage()._cdata], local)
        return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy

    def drop(self) -> None:
        """Return unused memory to the system: what moving the storages has freed, and what reading the copies has
        taken. The copies stay."""
        if self.target is not None:
            self.target.drop()

    def end(self) -> None:
        self.target = None
        self.copies.clear()


@contextmanager
def offload_learner(
    settings: Offload, model: nn.Module, optimizer: Any, folder: Path
) -> Iterator[OffloadedStorages]:
    """Offload model and optimizer, as the settings say, until the end of the block. Inside, the model can be
    read module by module. A learner on the CPU goes to a file in `folder`."""
    if not settings.enabled:
        yield OffloadedStorages()
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
    with offload_storages(tensors, folder) as offloaded, _use_stand_ins(model, offloaded), torch.no_grad():
        yield offloaded


def check_offload(settings: Offload, model: nn.Module) -> None:
    """Raise EngineError for a learner that could not be restored."""
    is_flat = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    if settings.enabled and settings.offload_model and is_flat:
        raise EngineError(
            "rollout_matching.offload.offload_model: FSDP version 1 moves the model's memory itself",
            "use FSDP2 (training.fsdp_config: {version: 2}) or DDP",
        )


@contextmanager
def _use_stand_ins(model: nn.Module, offloaded: OffloadedStorages) -> Iterator[None]:
    """Replace every offloaded parameter and buffer by one that can be read. Tied parameters share one stand-in."""
    stand_ins: dict[int, Tensor] = {}
    with ExitStack() as restore:
        for module in model.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None and tensor in offloaded:
                        restore.callback(table.__setitem__, name, tensor)
                        stand_in = offloaded.view(tensor)
                        if isinstance(tensor, nn.Parameter):
                            stand_in = nn.Parameter(stand_in, tensor.requires_grad)
                        table[name] = stand_ins.setdefault(id(tensor), stand_in)
        yield


@contextmanager
def offload_storages(tensors: Iterable[Tensor], folder: Path) -> Iterator[OffloadedStorages]:
    """Move the storages of these tensors away until the end of the block. Inside, read a tensor through `view`
    only: reading it directly would crash the process. The file for tensors on the CPU is in `folder`."""
    groups = _group_by_storage(tensors)
    size = sum(align_size(group[0].untyped_storage().nbytes()) for group in groups)
    with ExitStack() as restore:
        problem = f"rollout_matching.offload: {size / 1e9:.3f} GB of the learner could not be offloaded"
        fix = (
            f"a learner on the CPU needs that much disk space in {folder} (training.output_dir), one on an "
            "accelerator that much host memory; or set rollout_matching.offload.enabled: false"
        )
        with explain((OSError, RuntimeError), problem, fix, to=EngineError):
            offloaded = _move_out(groups, size, folder, restore)
        yield offloaded


def _to_local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _group_by_storage(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the tensors that are worth moving, grouped by storage. If any is on an accelerator, tensors on the
    CPU are left out, because they do not take memory from the engine."""
    by_storage: dict[int, dict[int, Tensor]] = {}
    for tensor in map(_to_local, tensors):
        storage = tensor.untyped_storage()
        if (storage.nbytes() >= SMALL or not storage.resizable()) and storage.data_ptr():
            by_storage.setdefault(storage._cdata, {})[id(tensor)] = tensor
    groups = [list(group.values()) for group in by_storage.values()]
    return [group for group in groups if group[0].device.type != "cpu"] or groups


def _move_out(groups: list[list[Tensor]], size: int, folder: Path, restore: ExitStack) -> OffloadedStorages:
    if not groups:
        return OffloadedStorages()
    target: MappedFile | PinnedMemory = PinnedMemory()
    if groups[0][0].device.type == "cpu":
        file = restore.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115 - `restore` closes it
        target = MappedFile(file, size)
    offloaded = OffloadedStorages(target)
    restore.callback(offloaded.end)
    for group in groups:
        storage = _make_resizable(group)
        copy = target.put(storage)
        restore.callback(_copy_back, storage, copy)
        offloaded.copies[storage._cdata] = copy
        storage.resize_(0)
    offloaded.drop()
    return offloaded


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


def _view_storage(storage: UntypedStorage, like: Tensor) -> Tensor:
    """Return a tensor over `storage` with the dtype, offset, size and strides of another one."""
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


class MappedFile:
    """An unnamed file, which disappears however the process ends. Its space is reserved first, because writing
    to a mapping on a full disk would kill the process."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        os.posix_fallocate(file.fileno(), 0, size)
        self.file, self.end = file, 0
        self.mapping = mmap.mmap(file.fileno(), size)

    def put(self, storage: UntypedStorage) -> UntypedStorage:
        size, start = storage.nbytes(), self.end
        self.file.seek(start)
        # Five times faster than a copy to new pages of the mapping. `Tensor.numpy` would forbid resizing.
        self.file.write((ctypes.c_char * size).from_address(storage.data_ptr()))
        self.file.flush()
        self.end += align_size(size)
        return torch.frombuffer(self.mapping, dtype=torch.uint8, count=size, offset=start).untyped_storage()

    def drop(self) -> None:
        self.mapping.madvise(mmap.MADV_DONTNEED)
        c = ctypes.CDLL(None)
        if hasattr(c, "malloc_trim"):  # glibc keeps memory that was freed in small pieces
            c.malloc_trim(0)


class PinnedMemory:
    def put(self, storage: UntypedStorage) -> UntypedStorage:
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True).untyped_storage()
        return copy.copy_(storage)

    def drop(self) -> None:
        torch.accelerator.empty_cache()
