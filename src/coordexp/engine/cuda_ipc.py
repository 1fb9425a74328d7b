"""The sender of weights to a colocated engine on the same GPUs: vLLM's own transfer through CUDA IPC.

vLLM packs the weights and passes on handles of the packed buffers. Between the processes they are plain values
here: nothing is pickled. The receiver is in `receive`. Never run so far: no GPU was available.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.device_allocator import alloc_conf
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

from coordexp.engine.start import CUDA_IPC
from coordexp.rollout.backend import Weights


class LearnerWeights(WeightSource):
    """The learner's weights as vLLM's weight source. Each iteration is a new pass over them."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.weights()

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self]


class CudaSender(IPCTrainerWeightTransferEngine):
    """The sender of vLLM, but IPC handles are sent as plain values, not pickled, and the memory that they refer to
    is never in an expandable segment."""

    def send_weights(self) -> None:
        with no_expandable_segments():
            super().send_weights()

    def _do_send(self, *args: Any, ipc_handles: Any, **kwargs: Any) -> None:
        plain = {device: plain_handle(handle) for device, handle in ipc_handles.items()}
        super()._do_send(*args, ipc_handles=plain, **kwargs)


@dataclass
class CudaIpc(IPCTrainerInitInfo):
    backend: ClassVar[str] = CUDA_IPC
    packed: bool = True


@contextmanager
def no_expandable_segments() -> Iterator[None]:
    """Switch torch's expandable segments off, if the user has switched them on, and on again at the end.

    To map a segment of that kind, the engine would have to take a file descriptor from the learner, which is its
    parent process, and Linux does not allow that by default. torch takes all of its allocator settings from one
    text, so the others are written again with it."""
    settings = alloc_conf.current_alloc_conf()
    if not alloc_conf.conf_flag_enabled(settings, alloc_conf.EXPANDABLE_SEGMENTS):
        yield
        return
    alloc_conf.set_alloc_conf(alloc_conf.with_conf_flag(settings, alloc_conf.EXPANDABLE_SEGMENTS, False))
    try:
        yield
    finally:
        alloc_conf.set_alloc_conf(settings)


def plain_handle(handle: Sequence[Any]) -> list[Any]:
    """Convert torch's handle of a shared tensor to numbers, text and bytes."""
    kind, size, stride, offset, storage, dtype, *rest = handle
    assert kind is torch.Tensor and storage is torch.storage.TypedStorage, (kind, storage)
    return [list(size), list(stride), offset, str(dtype).removeprefix("torch."), *rest]


def connect(rank: int, client: VLLMWeightSyncClient, source: LearnerWeights) -> TrainerWeightTransferEngine:
    """Return the sender of one rank. Every rank of the group that shares the engine needs one. `rank` is the place
    in that group; the first rank of the group talks to the engine."""
    largest = max(meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in source.metadata())
    info = CudaIpc(rank=rank, packed_buffer_size_bytes=max(largest, CudaIpc.packed_buffer_size_bytes))
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


WeightTransferTrainerFactory.register_engine(CUDA_IPC, CudaSender)
