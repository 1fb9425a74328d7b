"""Memory that two processes see: no file system, no copy between them."""

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Self

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
