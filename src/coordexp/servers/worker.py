"""The workers' end of a weight transfer to a rollout server. vLLM's workers import this module by name.

Each bucket is one broadcast. If the learner announces the length of the next bucket, the worker receives that one
while it loads this one.
"""

import os
import signal
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from coordexp.errors import UserError
from coordexp.rollout.load import Reload, build_adapter, clear_kv_caches, replace_adapter
from coordexp.rollout.weights import Metadata, WeightGroup, check_metadata, join, unflatten
from coordexp.servers.processes import OWNER, end_with


class ServerSide:
    """The methods that the server calls in every worker of its engine, by name.

    A new adapter is received and built while the old one is in use, and then takes its place."""

    model_runner: Any
    device: torch.device
    vllm_config: Any
    _coordexp_receiver: "Receiver"
    _adapter: dict[str, Tensor]
    _built: Any

    def coordexp_is_ready(self) -> None:
        """Ignore SIGTERM, which may be sent to all processes of a job. From here on only its owner ends the
        engine."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._coordexp_receiver = Receiver(self.model_runner.get_model(), self.vllm_config, self.device)

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

    def coordexp_join(self, host: str, port: int, world_size: int, timeout_s: float, is_plain: bool) -> None:
        self._coordexp_receiver.join(host, port, world_size, timeout_s, is_plain)

    def coordexp_leave(self) -> None:
        self._coordexp_receiver.leave()

    def coordexp_start(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            self._coordexp_receiver.start_weight_update()

    def coordexp_load(self, metadatas: list[Metadata], next_bytes: int) -> None:
        with set_current_vllm_config(self.vllm_config):
            self._coordexp_receiver.receive(metadatas, next_bytes)

    def coordexp_finish(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            self._coordexp_receiver.finish_weight_update()
        self.model_runner.reset_lora_state()

    def coordexp_abandon(self) -> None:
        """Abandon an update. The model then has neither old nor new weights, but can be given whole ones."""
        with set_current_vllm_config(self.vllm_config):
            self._coordexp_receiver.abandon()

    def coordexp_load_adapter(self, metadatas: list[Metadata]) -> None:
        self._adapter.update(self._coordexp_receiver.receive_adapter(metadatas))


class Receiver(Reload):
    """Receives buckets and loads them into a worker's model."""

    def __init__(self, model: Any, vllm_config: Any, device: torch.device) -> None:
        self.model, self.model_config, self.device = model, vllm_config.model_config, device
        self._rank = rank_in_server(vllm_config.parallel_config)
        self._group: WeightGroup | None = None
        self._ahead: Future[Tensor] | None = None
        self._buffers: list[Tensor] = []

    def join(self, host: str, port: int, world_size: int, timeout_s: float, is_plain: bool) -> None:
        """Join the group of a learner, or of a client of ms-swift (`is_plain`)."""
        self.leave()
        self._group = join(host, port, self._rank, world_size, self.device, timeout_s, is_plain)
        self._thread = ThreadPoolExecutor(1)
        self._free_buffers()

    def leave(self) -> None:
        """Leave the group. A transfer that is running ends with the group's connections, or at its deadline."""
        if self._group is not None:
            self._group.close()
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._group, self._ahead, self._buffers = None, None, []

    def receive(self, metadatas: list[Metadata], next_bytes: int) -> None:
        """Receive a bucket, unless it has been received ahead, and load it."""
        size = check_metadata(metadatas)
        ahead, self._ahead = self._ahead, None
        buffer = ahead.result() if ahead else self._receive(size)
        if buffer.numel() != size:
            raise ValueError(f"a bucket of {size} bytes was announced as {buffer.numel()}")
        if next_bytes:
            self._ahead = self._thread.submit(self._receive, next_bytes)
        self.load(metadatas, buffer)
        if self.device.type == "cuda":  # the next bucket but one overwrites the buffer
            torch.cuda.current_stream(self.device).synchronize()
        if not next_bytes:
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
        self.leave()
        for module in self.model.modules():  # drop incomplete layers: they may be the cause of the failure
            waiting = get_layerwise_info(module)
            waiting.loaded_weights.clear()
            waiting.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)
        self.wrap()

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


if OWNER in os.environ:  # this is a process of an engine
    # Workers inherit blocked signals (`processes.starting`). Until the engine is ready they need SIGTERM: vLLM
    # ends them with it if the engine does not start.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with(int(os.environ[OWNER]))
