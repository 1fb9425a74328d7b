"""The sender of whole weights to a colocated engine, through vLLM's own interface. `connection` decides when it
sends, and makes the calls to the engine for it.

On a CPU, weights are sent bucket by bucket: while the engine loads one, the learner fills the next. On a GPU,
vLLM's own sender does the packing.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

from coordexp.engine.start import CUDA_IPC, SHARED_MEMORY
from coordexp.engine.weights import BUCKET_BYTES, MemoryFile, buckets, write_tensors
from coordexp.rollout.backend import Weights


class LearnerWeights(WeightSource):
    """The learner's weights as vLLM's weight source. Each iteration is a new pass over them."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.weights()

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self]


@dataclass
class SharedMemory(TrainerInitInfo):
    backend: ClassVar[str] = SHARED_MEMORY


class SharedMemorySender(TrainerWeightTransferEngine[SharedMemory]):
    init_info_cls = SharedMemory

    @classmethod
    def trainer_init(
        cls, init_info: SharedMemory, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        sender = cls(client=client, source=source, is_sender=init_info.is_sender)
        sender.files = [MemoryFile.new(BUCKET_BYTES), MemoryFile.new(BUCKET_BYTES)]
        if sender.is_sender:
            client.init_weight_transfer_engine({})
        return sender

    def send_weights(self) -> None:
        """Send all weights. A rank that is not the sender only passes over them, because all ranks take part in
        gathering sharded weights."""
        assert self.source is not None
        weights = buckets(iter(self.source), BUCKET_BYTES)
        if not self.is_sender:
            deque(weights, maxlen=0)
            return
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            sent: list[Future[None]] = []
            for number, bucket in enumerate(weights):
                if number >= len(self.files):  # wait until the engine has read this file's previous bucket
                    sent[number - len(self.files)].result()
                contents = write_tensors(self.files[number % len(self.files)], bucket)
                sent.append(pool.submit(self.client.update_weights, contents))
            for future in sent:
                future.result()
        self.client.finish_weight_update()


class CudaSender(IPCTrainerWeightTransferEngine):
    """The sender of vLLM, but IPC handles are sent as plain values, not pickled."""

    def _do_send(self, *args: Any, ipc_handles: Any, **kwargs: Any) -> None:
        plain = {device: plain_handle(handle) for device, handle in ipc_handles.items()}
        super()._do_send(*args, ipc_handles=plain, **kwargs)


@dataclass
class CudaIpc(IPCTrainerInitInfo):
    backend: ClassVar[str] = CUDA_IPC
    packed: bool = True


def plain_handle(handle: Sequence[Any]) -> list[Any]:
    """Convert torch's handle of a shared tensor to numbers, text and bytes."""
    kind, size, stride, offset, storage, dtype, *rest = handle
    assert kind is torch.Tensor and storage is torch.storage.TypedStorage, (kind, storage)
    return [list(size), list(stride), offset, str(dtype).removeprefix("torch."), *rest]


def connect(
    device: torch.device, rank: int, client: VLLMWeightSyncClient, source: LearnerWeights
) -> TrainerWeightTransferEngine:
    """Return the sender of one rank. Every rank of the group that shares the engine needs one. `rank` is the place
    in that group; the first rank of the group talks to the engine."""
    if device.type != "cuda":
        return WeightTransferTrainerFactory.trainer_init(SharedMemory(rank=rank), client=client, source=source)
    largest = max(meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in source.metadata())
    info = CudaIpc(rank=rank, packed_buffer_size_bytes=max(largest, CudaIpc.packed_buffer_size_bytes))
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


WeightTransferTrainerFactory.register_engine(SHARED_MEMORY, SharedMemorySender)
WeightTransferTrainerFactory.register_engine(CUDA_IPC, CudaSender)
