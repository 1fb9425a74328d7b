"""Weights from the learner to a colocated engine on the same GPUs: both ends of vLLM's transfer through CUDA IPC.

vLLM packs the weights and passes on handles of the packed buffers. Between the processes they are plain values
here: nothing is pickled. Never run so far: no GPU was available.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCTrainerInitInfo,
    IPCTrainerWeightTransferEngine,
    IPCWeightTransferEngine,
    IPCWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_consumer

from coordexp.engine.receive import Reload
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


def connect(rank: int, client: VLLMWeightSyncClient, source: LearnerWeights) -> TrainerWeightTransferEngine:
    """Return the sender of one rank. Every rank of the group that shares the engine needs one. `rank` is the place
    in that group; the first rank of the group talks to the engine."""
    largest = max(meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in source.metadata())
    info = CudaIpc(rank=rank, packed_buffer_size_bytes=max(largest, CudaIpc.packed_buffer_size_bytes))
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


class CudaReceiver(Reload, IPCWeightTransferEngine):
    """The receiver of vLLM, except that handles come as plain values: nothing is unpickled."""

    def parse_update_info(self, update_dict: dict[str, Any]) -> IPCWeightTransferUpdateInfo:
        handles = {device: cuda_handle(values) for device, values in update_dict["ipc_handles"].items()}
        return super().parse_update_info(update_dict | {"ipc_handles": handles})

    def receive_weights(self, update_info: IPCWeightTransferUpdateInfo) -> None:
        assert isinstance(update_info.ipc_handles, dict)
        self.take(
            packed_ipc_consumer(
                ipc_handle=update_info.ipc_handles,
                names=update_info.names,
                shapes=update_info.shapes,
                dtype_names=update_info.dtype_names,
                tensor_sizes=update_info.tensor_sizes,
                device_index=self.device.index,
                importer=self._packed_importer,
            )
        )

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._packed_importer.close()


def cuda_handle(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return torch's handle of a shared tensor from the values of `plain_handle`."""
    size, stride, offset, dtype, *rest = values
    shape = torch.Size(size)
    return (torch.Tensor, shape, tuple(stride), offset, torch.storage.TypedStorage, getattr(torch, dtype), *rest)


WeightTransferTrainerFactory.register_engine(CUDA_IPC, CudaSender)
