"""Takes the memory under tensors away for a while, and brings it back bit for bit.

It is moved by storages: whatever shares one still does afterwards, also tensors that nobody told of. From the CPU
it goes to a file, from an accelerator to pinned host memory.
"""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Protocol

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from coordexp.errors import EngineError
from coordexp.rollout.memory_file import aligned

SMALL = 1024  # bytes: such storages stay, except in a mapped file, of which one would hold all


class Place(Protocol):
    def put(self, storage: UntypedStorage) -> UntypedStorage:
        """A copy of it there."""

    def drop(self) -> None:
        """Frees what is there from the memory that the engine needs."""


class Away:
    """What has gone, by storage."""

    def __init__(self, place: Place | None = None) -> None:
        self.place = place
        self.copies: dict[int, UntypedStorage] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return _local(tensor).untyped_storage()._cdata in self.copies

    def view(self, tensor: Tensor) -> Tensor:
        """The same tensor, over the memory where it is meanwhile."""
        local = _local(tensor)
        found = _over(self.copies[local.untyped_storage()._cdata], local)
        return DTensor(found, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else found

    def drop(self) -> None:
        """Frees again what reading has brought into memory."""
        if self.place is not None:
            self.place.drop()

    def end(self) -> None:
        self.place = None
        self.copies.clear()


@contextmanager
def gone(tensors: Iterable[Tensor], folder: Path) -> Iterator[Away]:
    """Without the memory under these tensors, whose file is in `folder`. Inside they are read by `view`: reading
    one of them itself ends the process."""
    groups = _by_storage(tensors)
    size = sum(aligned(group[0].untyped_storage().nbytes()) for group in groups)
    with ExitStack() as back:
        try:
            away = _go(groups, size, folder, back)
        except (OSError, RuntimeError) as error:
            raise EngineError(
                f"rollout_matching.offload: {size / 1e9:.3f} GB of the learner could not leave memory: {error}\n"
                f"  a learner on the CPU needs as much disk at {folder} (training.output_dir), one on an "
                "accelerator as much host memory; or set rollout_matching.offload.enabled: false"
            ) from error
        yield away


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _by_storage(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Where any of it is on an accelerator, what is on the CPU stays: it is not in the engine's way."""
    groups: dict[int, dict[int, Tensor]] = {}
    for tensor in map(_local, tensors):
        storage = tensor.untyped_storage()
        if (storage.nbytes() >= SMALL or not storage.resizable()) and storage.data_ptr():
            groups.setdefault(storage._cdata, {})[id(tensor)] = tensor
    found = [list(group.values()) for group in groups.values()]
    return [group for group in found if group[0].device.type != "cpu"] or found


def _go(groups: list[list[Tensor]], size: int, folder: Path, back: ExitStack) -> Away:
    if not groups:
        return Away()
    place = back.enter_context(_place(groups[0][0].device, folder, size))
    away = Away(place)
    back.callback(away.end)
    for group in groups:
        storage = _resizable(group)
        copy = place.put(storage)
        back.callback(_come_back, storage, copy)
        away.copies[storage._cdata] = copy
        storage.resize_(0)
    away.drop()
    return away


@contextmanager
def _place(device: torch.device, folder: Path, size: int) -> Iterator[Place]:
    if device.type != "cpu":
        yield PinnedMemory()
        return
    with tempfile.TemporaryFile(dir=folder) as file:
        yield MappedFile(file, size)


def _come_back(storage: UntypedStorage, copy: UntypedStorage) -> None:
    storage.resize_(copy.nbytes())
    storage.copy_(copy)


def _resizable(group: list[Tensor]) -> UntypedStorage:
    """Memory that belongs to something else, such as a checkpoint's mapped file, is exchanged for its like
    once. Only here do tensors that nobody told of stay behind."""
    storage = group[0].untyped_storage()
    if storage.resizable():
        return storage
    own = storage.clone()
    for tensor in group:
        tensor.data = _over(own, tensor)
    return own


def _over(storage: UntypedStorage, like: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


class MappedFile:
    """In a file without a name, of which nothing is left however the process ends. Its space is reserved first:
    a mapping on a full disk would end the process."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        os.posix_fallocate(file.fileno(), 0, size)
        self.file, self.end = file, 0
        self.mapping = mmap.mmap(file.fileno(), size)

    def put(self, storage: UntypedStorage) -> UntypedStorage:
        size, start = storage.nbytes(), self.end
        self.file.seek(start)
        # Five times faster than a copy to new pages of the mapping; `Tensor.numpy` would forbid resizing.
        self.file.write((ctypes.c_char * size).from_address(storage.data_ptr()))
        self.file.flush()
        self.end += aligned(size)
        return torch.frombuffer(self.mapping, dtype=torch.uint8, count=size, offset=start).untyped_storage()

    def drop(self) -> None:
        self.mapping.madvise(mmap.MADV_DONTNEED)
        c = ctypes.CDLL(None)
        if hasattr(c, "malloc_trim"):  # glibc keeps what is freed in small pieces
            c.malloc_trim(0)


class PinnedMemory:
    def put(self, storage: UntypedStorage) -> UntypedStorage:
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True).untyped_storage()
        return copy.copy_(storage)

    def drop(self) -> None:
        torch.accelerator.empty_cache()
