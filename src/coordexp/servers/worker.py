"""The workers' end of a weight transfer to a rollout server. vLLM's workers import this module by name.

Each bucket is one broadcast. If the learner announces the length of the next bucket, the worker receives that one
while it loads this one.
"""

import signal
import traceback
from itertools import chain
from multiprocessing import parent_process
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from coordexp.errors import UserError
from coordexp.rollout.load import Reload, build_adapter, clear_kv_caches, replace_adapter
from coordexp.servers.processes import end_with_parent
from coordexp.servers.transfer import Metadata, WeightGroup, check_metadata, join, unflatten
from coordexp.tasks import Task


class ServerSide:
    """The methods that the server calls in every worker of its engine, by name."""

    model_runner: Any
    device: torch.device
    vllm_config: Any
    _coordexp_receiver: "Receiver"

    def coordexp_is_ready(self) -> None:
        """Ignore SIGTERM, which may be sent to all processes of a job. From here on only its owner ends the
        engine."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._coordexp_receiver = Receiver(self.model_runner, self.vllm_config, self.device)

    def coordexp_ping(self) -> None:
        """Return, which shows that this worker does not hang."""

    def coordexp_try(self, method: str, *arguments: Any) -> tuple[str, str] | None:
        """Call a method of the receiver. Return the problem and the fix of the error that it raised, or None. An
        error that is not a UserError has no fix."""
        try:
            with set_current_vllm_config(self.vllm_config):
                getattr(self._coordexp_receiver, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - reported to the owner
            traceback.print_exc()
            if isinstance(error, UserError):
                return error.problem, error.fix
            return str(error) or type(error).__name__, ""
        return None


class Receiver(Reload):
    """Receives buckets and loads them into a worker's model. The buckets of an adapter are kept until it is built,
    while the one before is in use, and then takes its place."""

    def __init__(self, runner: Any, vllm_config: Any, device: torch.device) -> None:
        super().__init__(runner)
        self.device = device
        # vLLM numbers the workers of each replica from 0. The group has those of all replicas.
        parallel = vllm_config.parallel_config
        self._rank = int(parallel.data_parallel_index * parallel.world_size + parallel.rank)
        self._group: WeightGroup | None = None
        self._ahead: Task[Tensor] | None = None
        self._buffers: list[Tensor] = []
        self._adapter: dict[str, Tensor] | None = None  # the tensors so far, during an update of an adapter
        self._built: Any = None

    def join(self, host: str, port: int, world_size: int, timeout_s: float) -> None:
        """Join the group of a learner."""
        self.leave()
        self._group = join(host, port, self._rank, world_size, self.device, timeout_s)
        self._free_buffers()

    def leave(self) -> None:
        """Leave the group. A transfer that is running ends with the group's connections, or at its deadline."""
        if self._group is not None:
            self._group.close()
        self._group, self._ahead, self._buffers = None, None, []

    def begin(self, is_adapter: bool = False) -> None:
        self._adapter, self._built = {} if is_adapter else None, None
        if not is_adapter:
            self.runner.reset_lora_state()  # an adapter belongs to the weights that are replaced now
            super().begin()

    def load(self, metadatas: list[Metadata], next_bytes: int) -> None:
        """Receive a bucket, unless it has been received ahead, and load it. A later bucket overwrites its buffer,
        but vLLM's reload keeps references to a layer's weights until the last of them has arrived, which may be in
        a later bucket or at the end. Those that still point to the buffer are cloned."""
        size = check_metadata(metadatas)
        ahead, self._ahead = self._ahead, None
        buffer = ahead.result() if ahead else self._receive(size)
        if buffer.numel() != size:
            raise ValueError(f"a bucket of {size} bytes was announced as {buffer.numel()}")
        if next_bytes:
            self._ahead = Task(self._receive, next_bytes)
        weights = unflatten(metadatas, buffer)
        if self._adapter is not None:  # vLLM keeps adapters on the host
            self._adapter |= {name: weight.to("cpu", copy=True) for name, weight in weights}
        else:
            self.load_weights(weights)
            start = buffer.untyped_storage().data_ptr()
            layers = map(get_layerwise_info, self.model.modules())
            for _, call in chain.from_iterable(layer.loaded_weights for layer in layers):
                for name, value in call.arguments.items():
                    is_real = isinstance(value, Tensor) and not value.is_meta
                    if is_real and value.untyped_storage().data_ptr() == start:
                        call.arguments[name] = value.clone()
        if self.device.type == "cuda":  # the next bucket but one overwrites the buffer
            torch.cuda.current_stream(self.device).synchronize()
        if not next_bytes:
            self._free_buffers()  # until the next update

    def build_adapter(self, config: dict[str, Any], id: int) -> None:
        """Build vLLM's adapter from the received tensors. The old adapter stays in use."""
        self._built = build_adapter(self.runner.lora_manager, self._adapter or {}, config, id)

    def finish(self) -> None:
        """Put the adapter that was built, or the loaded weights, into use."""
        if self._adapter is None:
            super().finish()
            self.runner.reset_lora_state()
        else:
            replace_adapter(self.runner.lora_manager, self._built)
        self._adapter = self._built = None
        clear_kv_caches(self.runner.kv_caches)

    def abandon(self, is_adapter: bool) -> None:
        """Give up an update because the learner has left or stopped sending. An announced bucket will not come. A
        model that had begun to take whole weights has neither old nor new ones, but can be given whole ones."""
        self._adapter = self._built = None
        if not is_adapter or self._ahead is not None:
            self.leave()
        if is_adapter:
            return
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


if parent_process() is not None:  # vLLM has imported this module in a worker
    # Workers inherit blocked signals (`processes.starting`). Until the engine is ready they need SIGTERM: vLLM
    # ends them with it if the engine does not start.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with_parent()
