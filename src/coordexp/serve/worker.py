"""The workers' end of a weight transfer to a rollout server. vLLM's workers import this module by name.

Each bucket comes as one broadcast. A learner that says how long the next one is has it received while this one is
taken in.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from coordexp.rollout.broadcast import Metadata, Place, WeightGroup, join, unflattened
from coordexp.rollout.engine_adapter import plain_name
from coordexp.rollout.engine_side import EngineSide, Reload, keep_what_waits
from coordexp.serve.engine import BROADCAST


class ServerSide(EngineSide):
    """What the server may ask every worker of its engine, by name."""

    weight_transfer_engine: Any
    vllm_config: Any
    _weight_update_active: bool

    def coordexp_state_keys(self) -> list[str]:
        return [plain_name(name) for name, _ in self.model_runner.get_model().named_parameters()]

    def coordexp_abandon(self) -> None:
        """Leaves a model that holds neither the old weights nor the new ones, but can be given whole ones."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.abandon()
        self._weight_update_active = False

    def coordexp_leave(self) -> None:
        self.weight_transfer_engine.shutdown()

    def coordexp_take_adapter(self, metadatas: list[Metadata]) -> None:
        self._adapter.update(self.weight_transfer_engine.receive_adapter(metadatas))


@dataclass
class Joining(WeightTransferInitInfo):
    host: str
    port: int
    world_size: int
    timeout_s: float
    plain: bool = False  # with a client of ms-swift


@dataclass
class Bucket(WeightTransferUpdateInfo):
    metadatas: list[Metadata]
    next_bytes: int = 0  # of the bucket after this one, if it comes at once


class BroadcastReceiver(Reload, WeightTransferEngine[Joining, Bucket]):
    init_info_cls, update_info_cls = Joining, Bucket

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: WeightGroup | None = None
        self._ahead: Future[Tensor] | None = None
        self._buffers: list[Tensor] = []

    def init_transfer_engine(self, init_info: Joining) -> None:
        self.shutdown()
        told = (init_info.host, init_info.port, rank_in_server(self.parallel_config), init_info.world_size)
        self._group = join(*told, self.device, init_info.timeout_s, init_info.plain)
        self._receiver = ThreadPoolExecutor(1)
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=self.device)] * 2

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # vLLM's would wait for an accelerator

    def receive_weights(self, update_info: Bucket) -> None:
        places, size = _places(update_info.metadatas)
        coming, self._ahead = self._ahead, None
        buffer = coming.result() if coming else self._received(size)
        if buffer.numel() != size:
            raise ValueError(f"a bucket of {size} bytes was announced as {buffer.numel()}")
        if update_info.next_bytes:
            self._ahead = self._receiver.submit(self._received, update_info.next_bytes)
        self.take(unflattened(places, buffer))
        start = buffer.untyped_storage().data_ptr()
        keep_what_waits(self.model, lambda tensor: tensor.untyped_storage().data_ptr() == start)
        if self.device.type == "cuda":  # the buffer is written to again
            torch.cuda.current_stream(self.device).synchronize()

    def receive_adapter(self, metadatas: list[Metadata]) -> dict[str, Tensor]:
        """Tensors of their own, on the host, where vLLM keeps adapters."""
        places, size = _places(metadatas)
        return {name: part.to("cpu", copy=True) for name, part in unflattened(places, self._received(size))}

    def abandon(self) -> None:
        """The learner has left, or has stopped sending: a bucket that was announced does not come."""
        self.shutdown()
        for module in self.model.modules():  # what has come of a layer in part may be what was wrong
            waiting = get_layerwise_info(module)
            waiting.loaded_weights.clear()
            waiting.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)
        self.wrap()

    def shutdown(self) -> None:
        """What is being received ends with the group's connections, or at its deadline."""
        if self._group is not None:
            self._group.close()
            self._receiver.shutdown(wait=False, cancel_futures=True)
        self._group, self._ahead, self._buffers = None, None, []

    def _received(self, size: int) -> Tensor:
        if self._group is None:
            raise RuntimeError("no learner has joined: weights come after /init_communicator/")
        buffer = self._buffers.pop(0)  # not the one that the last bucket is still taken from
        if buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._buffers.append(buffer)
        self._group.broadcast(buffer[:size])
        return buffer[:size]


def rank_in_server(parallel_config: Any) -> int:
    """Return the rank of a worker among all workers of its server. vLLM numbers the workers of each replica from
    0, and keeps the number of the replica as `data_parallel_index`."""
    return int(parallel_config.data_parallel_index * parallel_config.world_size + parallel_config.rank)


def _places(metadatas: list[Metadata]) -> tuple[list[Place], int]:
    """In a bucket, and its length."""
    places = [Place.of(told) for told in metadatas]
    return places, max(place.end for place in places)


WeightTransferEngineFactory.register_engine(BROADCAST, BroadcastReceiver)
