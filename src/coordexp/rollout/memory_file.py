"""Memory that two processes see: no file system, no copy between them."""

import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """The room that so many bytes take where tensors lie one behind the other."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class MemoryFile:
    """It has a descriptor and no name: nothing is left of it when the processes that map it have ended. It may
    grow, which whoever maps it has to be told."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self._map()
        weakref.finalize(self, os.close, fd)

    @classmethod
    def new(cls, size: int) -> Self:
        fd = os.memfd_create("coordexp-weights")
        os.ftruncate(fd, size)
        return cls(fd, size)

    @classmethod
    def of_process(cls, pid: int, fd: int, size: int) -> Self:
        """One that another process of the same user has made."""
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), size)

    def grow(self, size: int) -> None:
        os.ftruncate(self.fd, size)
        self.grown(size)

    def grown(self, size: int) -> None:
        """By the process that made it."""
        self.size = size
        self._map()

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        length = dtype.itemsize * torch.Size(shape).numel()
        return self._bytes[offset : offset + length].view(dtype).view(torch.Size(shape))

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._bytes.data_ptr()

    def _map(self) -> None:
        self._bytes = torch.frombuffer(mmap.mmap(self.fd, self.size), dtype=torch.uint8)


def write_tensors(file: MemoryFile, tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    """Write the tensors to the file, which grows if it has to. Return plain values that describe its contents to
    another process."""
    offsets = [0, *accumulate(aligned(tensor.nbytes) for _, tensor in tensors)]
    if offsets[-1] > file.size:
        file.grow(offsets[-1])
    for (_, tensor), offset in zip(tensors, offsets, strict=False):
        file.tensor(offset, tensor.dtype, tensor.shape).copy_(tensor)
    return {
        "file": (os.getpid(), file.fd, file.size),
        "names": [name for name, _ in tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
        "offsets": offsets[:-1],
    }


def tensors_in(file: MemoryFile, contents: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield views of the tensors that `write_tensors` described, from a file that is mapped in this process."""
    columns = (contents[key] for key in ("names", "dtype_names", "shapes", "offsets"))
    for name, dtype, shape, offset in zip(*columns, strict=True):
        yield name, file.tensor(offset, getattr(torch, dtype), shape)


def read_tensors(contents: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Map the file that `write_tensors` described in another process, and yield views of its tensors."""
    return tensors_in(MemoryFile.of_process(*contents["file"]), contents)
