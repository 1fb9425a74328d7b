"""Weights on their way to an engine: buckets that fit a buffer, memory that two processes share, and the check
that all values are finite."""

import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from coordexp.errors import EngineError, UserError

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 64  # bytes; every tensor in a buffer starts at a multiple of it
Bucket = list[tuple[str, Tensor]]
DIVERGED = (
    "the training has diverged: start a new run with model.path at an earlier checkpoint and a lower "
    "training.learning_rate; weights with NaN or Inf are sent to no engine"
)


def align_size(nbytes: int) -> int:
    """Return the number of bytes that a tensor takes in a buffer, including the padding behind it."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def buckets(weights: Iterator[tuple[str, Tensor]], size: int) -> Iterator[Bucket]:
    """Split the weights into buckets, in their order. Only a bucket with a single tensor may exceed `size`
    bytes."""
    bucket: Bucket = []
    free = size
    for name, weight in weights:
        if bucket and weight.nbytes > free:
            yield bucket
            bucket, free = [], size
        bucket.append((name, weight))
        free -= weight.nbytes + ALIGNMENT
    if bucket:
        yield bucket


def find_non_finite(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first weight that has a NaN or an Inf, or None.

    The minimum and maximum of a tensor take one pass over it and no temporary copy; a NaN becomes both of them.
    The host waits for the device once, for all given weights."""
    names: list[str] = []
    extremes: list[Tensor] = []
    for name, weight in weights:
        if weight.numel() and can_be_non_finite(weight.dtype):
            names.append(name)
            comparable = weight.detach().float() if weight.dtype.itemsize == 1 else weight.detach()
            extremes.append(torch.stack(torch.aminmax(comparable)).double())
    if not names:
        return None
    if len({pair.device for pair in extremes}) > 1:
        extremes = [pair.cpu() for pair in extremes]
    finite = torch.stack(extremes).isfinite().all(dim=1).tolist()
    return next((name for name, is_finite in zip(names, finite, strict=True) if not is_finite), None)


def can_be_non_finite(dtype: torch.dtype) -> bool:
    """Return True for floating-point dtypes except the packed 4-bit one, which has neither NaN nor Inf."""
    return dtype.is_floating_point and dtype is not getattr(torch, "float4_e2m1fn_x2", None)


def check_finite(weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise UserError if a weight has a NaN or an Inf."""
    if (name := find_non_finite(weights)) is not None:
        raise UserError(f"{name} has NaN or Inf values, and was not loaded", DIVERGED)


def non_finite_error(name: str) -> EngineError:
    """Return the error of a learner whose weights are not finite."""
    return EngineError(f"the learner's weights were not sent: {name} has NaN or Inf values", DIVERGED)


class MemoryFile:
    """Memory that two processes map, without a file system and without a copy between them.

    It has a descriptor and no name, so nothing is left of it when the processes that map it have ended. After its
    owner has called `grow`, the other process must call `remap` with the new size."""

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
    def from_process(cls, pid: int, fd: int, size: int) -> Self:
        """Map the file that another process of the same user has created."""
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), size)

    def grow(self, size: int) -> None:
        os.ftruncate(self.fd, size)
        self.remap(size)

    def remap(self, size: int) -> None:
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
    """Write the tensors to the file, which grows if necessary. Return plain values that describe its contents to
    another process."""
    offsets = [0, *accumulate(align_size(tensor.nbytes) for _, tensor in tensors)]
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
    return tensors_in(MemoryFile.from_process(*contents["file"]), contents)
