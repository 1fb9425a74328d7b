"""The workers' end of a weight transfer to a rollout server. vLLM's workers import this module by name.

Each bucket is one broadcast. If the learner announces the length of the next bucket, the worker receives that one
while it loads this one.
"""

import os
import signal
import traceback
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

from coordexp.engine.load import Reload, build_adapter, clear_kv_caches, replace_adapter
from coordexp.engine.weights import Metadata, WeightGroup, check_metadata, join, unflatten
from coordexp.errors import UserError
from coordexp.servers.engine import BROADCAST
from coordexp.servers.processes import OWNER, end_with


class ServerSide:
    """The methods that the server calls in every worker of its engine, by name.

    A new adapter is received and built while the old one is in use, and then takes its place."""

    model_runner: Any
    weight_transfer_engine: Any
    vllm_config: Any
    _weight_update_active: bool
    _adapter: dict[str, Tensor]
    _built: Any

    def coordexp_is_ready(self) -> None:
        """Ignore SIGTERM, which may be sent to all processes of a job. From here on only its owner ends the
        engine."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def coordexp_ping(self) -> None:
        """Return, which shows that this worker does not hang."""

    def coordexp_clear_kv_cache(self) -> None:
        """Set the KV cache to 0. Call it when the weights have changed and no request runs."""
        clear_kv_caches(self.model_runner.kv_caches)

    def coordexp_try(self, method: str, *arguments: Any) -> tuple[str, str] | None:
        """Call another method of the worker. Return the problem and the fix of the error that it raised, or None.
        An error that is not a UserError has no fix."""
        try:
            getattr(self, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - reported to the owner
            traceback.print_exc()
            if isinstance(error, UserError):
                return error.problem, error.fix
            return str(error) or type(error).__name__, ""
        return None

    def coordexp_build_adapter(self, config: dict[str, Any], id: int) -> None:
        """Build vLLM's adapter from the received tensors. The old adapter stays in use."""
        self._built = build_adapter(self.model_runner.lora_manager, self._adapter, config, id)
        self._adapter = {}

    def coordexp_use_adapter(self) -> None:
        adapter, self._built = self._built, None
        replace_adapter(self.model_runner.lora_manager, adapter)

    def coordexp_forget_adapter(self) -> None:
        """Forget an adapter that was received or built but is not in use."""
        self._adapter, self._built = {}, None

    def coordexp_remove_adapter(self) -> None:
        self.coordexp_forget_adapter()
        self.model_runner.lora_manager.remove_all_adapters()

    def coordexp_state_keys(self) -> list[str]:
        return [name.replace(".base_layer.", ".") for name, _ in self.model_runner.get_model().named_parameters()]

    def coordexp_abandon(self) -> None:
        """Abandon an update. The model then has neither old nor new weights, but can be given whole ones."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.abandon()
        self._weight_update_active = False

    def coordexp_leave(self) -> None:
        self.weight_transfer_engine.shutdown()

    def coordexp_take_adapter(self, metadatas: list[Metadata]) -> None:
        self._adapter.update(self.weight_transfer_engine.receive_adapter(metadatas))


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """The learner's group to join."""

    host: str
    port: int
    world_size: int
    timeout_s: float
    plain: bool = False  # the other end is a client of ms-swift


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """The tensors of a bucket."""

    metadatas: list[Metadata]
    next_bytes: int = 0  # the length of the next bucket, if it comes at once


class BroadcastReceiver(Reload, WeightTransferEngine[GroupInfo, BucketInfo]):
    """Receives buckets and loads them into the model."""

    init_info_cls, update_info_cls = GroupInfo, BucketInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: WeightGroup | None = None
        self._ahead: Future[Tensor] | None = None
        self._buffers: list[Tensor] = []

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        self.shutdown()
        self._group = join(
            init_info.host,
            init_info.port,
            rank_in_server(self.parallel_config),
            init_info.world_size,
            self.device,
            init_info.timeout_s,
            init_info.plain,
        )
        self._receiver = ThreadPoolExecutor(1)
        self._free_buffers()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # vLLM's own method needs an accelerator

    def receive_weights(self, update_info: BucketInfo) -> None:
        size = check_metadata(update_info.metadatas)
        ahead, self._ahead = self._ahead, None
        buffer = ahead.result() if ahead else self._receive(size)
        if buffer.numel() != size:
            raise ValueError(f"a bucket of {size} bytes was announced as {buffer.numel()}")
        if update_info.next_bytes:
            self._ahead = self._receiver.submit(self._receive, update_info.next_bytes)
        self.load(update_info.metadatas, buffer)
        if self.device.type == "cuda":  # the next bucket but one overwrites the buffer
            torch.cuda.current_stream(self.device).synchronize()
        if not update_info.next_bytes:
            self._free_buffers()  # until the next update

    def load(self, metadatas: list[Metadata], buffer: Tensor) -> None:
        """Load a bucket from a buffer that a later bucket overwrites. vLLM's reload keeps references to a layer's
        weights until the last of them has arrived, which may be in a later bucket or at the end. Those that still
        point to the buffer are cloned."""
        self.take(unflatten(metadatas, buffer))
        start = buffer.untyped_storage().data_ptr()
        for module in self.model.modules():
            for _, call in get_layerwise_info(module).loaded_weights:
                for name, value in call.arguments.items():
                    is_real = isinstance(value, Tensor) and not value.is_meta
                    if is_real and value.untyped_storage().data_ptr() == start:
                        call.arguments[name] = value.clone()

    def receive_adapter(self, metadatas: list[Metadata]) -> dict[str, Tensor]:
        """Return copies of the tensors on the host, where vLLM keeps adapters."""
        buffer = self._receive(check_metadata(metadatas))
        return {name: part.to("cpu", copy=True) for name, part in unflatten(metadatas, buffer)}

    def abandon(self) -> None:
        """Give up an update because the learner has left or stopped sending. An announced bucket will not come."""
        self.shutdown()
        for module in self.model.modules():  # drop incomplete layers: they may be the cause of the failure
            waiting = get_layerwise_info(module)
            waiting.loaded_weights.clear()
            waiting.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)
        self.wrap()

    def shutdown(self) -> None:
        """Leave the group. A transfer that is running ends with the group's connections, or at its deadline."""
        if self._group is not None:
            self._group.close()
            self._receiver.shutdown(wait=False, cancel_futures=True)
        self._group, self._ahead, self._buffers = None, None, []

    def _free_buffers(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=self.device)] * 2

    def _receive(self, size: int) -> Tensor:
        if self._group is None:
            raise RuntimeError("no learner has joined: call /init_communicator/ before sending weights")
        buffer = self._buffers.pop(0)  # the other one still holds the bucket that is being loaded
        if buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._buffers.append(buffer)
        self._group.broadcast(buffer[:size])
        return buffer[:size]


def rank_in_server(parallel_config: Any) -> int:
    """Return the rank of a worker among all workers of its server. vLLM numbers the workers of each replica from
    0, and keeps the number of the replica as `data_parallel_index`."""
    return int(parallel_config.data_parallel_index * parallel_config.world_size + parallel_config.rank)


WeightTransferEngineFactory.register_engine(BROADCAST, BroadcastReceiver)
if OWNER in os.environ:  # this is a process of an engine
    # Workers inherit blocked signals (`processes.starting`). Until the engine is ready they need SIGTERM: vLLM
    # ends them with it if the engine does not start.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with(int(os.environ[OWNER]))
