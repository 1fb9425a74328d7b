"""The engine's end of the weight transfer. Its workers import this module by name; the learner does not.

On a CPU, for which vLLM ships no transfer, weights are read from memory that the learner maps too; on GPUs they
come by vLLM's CUDA IPC.
"""

import ctypes
import mmap
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_consumer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from coordexp.rollout.buckets import check_finite
from coordexp.rollout.engine import CUDA_IPC, OWNER, SHARED_MEMORY, end_with
from coordexp.rollout.engine_adapter import AdapterSide, Unwrapped
from coordexp.rollout.memory_file import MemoryFile, tensors_in

LIBC = ctypes.CDLL(None)
LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class EngineSide(AdapterSide):
    """What its owner may ask every worker of the engine, by name."""

    def coordexp_is_ready(self) -> None:
        """From here on only its owner ends the engine: SIGTERM may be for all processes of a job."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def coordexp_ping(self) -> None:
        """Answer, which only a worker that goes on can."""

    def coordexp_clear_kv_cache(self) -> None:
        """Call it when the weights have changed and no request runs."""
        clear_kv_caches(self.model_runner.kv_caches)


class Reload:
    """Takes weights under the names of the checkpoint, and takes care that they are all there afterwards. In an
    update the model is without vLLM's LoRA wrappers, if it has any."""

    model: Any
    model_config: Any
    _unwrapped: Unwrapped | None = None

    def start_weight_update(self) -> None:
        self._unwrapped = Unwrapped(self.model)
        self._wanted = {name for name, _ in self.model.named_parameters()}  # of tied ones, the first
        initialize_layerwise_reload(self.model)

    def take(self, given: Iterable[tuple[str, Tensor]]) -> None:
        """Load the weights of a bucket. If one of them is not finite, nothing of the bucket is loaded."""
        weights, at = list(given), ""
        check_finite(weights)

        def passing() -> Iterator[tuple[str, Tensor]]:
            nonlocal at
            for at, weight in weights:  # noqa: UP028 - `at` names the weight that cannot be taken
                yield at, weight

        try:
            self._wanted -= self.model.load_weights(passing())
        except Exception as error:
            raise ValueError(f"at {at}: {str(error) or type(error).__name__}") from error

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        rebuild_heads(self.model)
        self.wrap()
        if self._wanted:
            some = ", ".join(sorted(self._wanted)[:3])
            raise ValueError(f"{len(self._wanted)} weights of the engine were not sent, among them {some}")

    def wrap(self) -> None:
        """Put the LoRA wrappers back after an update."""
        if self._unwrapped is not None:
            self._unwrapped.back()
        self._unwrapped = None


def clear_kv_caches(caches: Iterable[Tensor | list[Tensor]]) -> None:
    """Set all bytes of an engine's KV caches to 0. A layer has one tensor, or a list of them.

    Attention multiplies the values in the unused slots of a block by a probability of 0, and 0 * NaN is NaN: what
    weights with NaN have left there would spoil later answers until the slots are written to again. On a GPU this
    is a memset. On a CPU the pages go back to the system and come again as zeros when they are
    used: writing zeros would claim memory that the engine may never use."""
    tensors = [one for cache in caches for one in (cache if isinstance(cache, list) else [cache])]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    for storage in storages.values():
        data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        start, end = whole_pages(data) if data.device.type == "cpu" else (0, 0)
        data[:start].zero_()
        data[end:].zero_()
        if start < end and LIBC.madvise(data.data_ptr() + start, end - start, mmap.MADV_DONTNEED):
            data[start:end].zero_()
    for device in {storage.device for storage in storages.values() if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)  # the engine may compute on another stream


def whole_pages(data: Tensor) -> tuple[int, int]:
    """Return the part of the bytes that consists of whole pages of memory."""
    first = -data.data_ptr() % mmap.PAGESIZE
    length = max(0, data.numel() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    return (first, first + length) if length else (0, 0)


def rebuild_heads(model: torch.nn.Module) -> None:
    """On a CPU a head multiplies by a packed copy of its weight, which the reload leaves as it was where the
    weight is the embedding's."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@dataclass
class NothingToAgree(WeightTransferInitInfo):
    pass


@dataclass
class SharedUpdate(WeightTransferUpdateInfo):
    """Where the tensors of a bucket begin in the learner's memory file: its process, descriptor and size."""

    file: tuple[int, int, int]
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]


class SharedMemoryReceiver(Reload, WeightTransferEngine[NothingToAgree, SharedUpdate]):
    init_info_cls, update_info_cls = NothingToAgree, SharedUpdate

    def init_transfer_engine(self, init_info: NothingToAgree) -> None:
        self._files: dict[tuple[int, int], MemoryFile] = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # vLLM's would wait for an accelerator

    def receive_weights(self, update_info: SharedUpdate) -> None:
        file = self._mapped(*update_info.file)
        self.take(tensors_in(file, asdict(update_info)))
        keep_what_waits(self.model, file.holds)

    def _mapped(self, pid: int, fd: int, size: int) -> MemoryFile:
        if (pid, fd) not in self._files:
            self._files[pid, fd] = MemoryFile.of_process(pid, fd, size)
        file = self._files[pid, fd]
        if file.size != size:
            file.grown(size)
        return file

    def shutdown(self) -> None:
        self._files = {}


def keep_what_waits(model: torch.nn.Module, is_held: Callable[[Tensor], bool]) -> None:
    """The reload keeps a layer's weights as they were given until the last of them has come, which may be in a
    later bucket, or at the end; and what `is_held` is written to again as soon as it has been read."""
    for module in model.modules():
        for _, given in get_layerwise_info(module).loaded_weights:
            for name, value in given.arguments.items():
                if isinstance(value, Tensor) and not value.is_meta and is_held(value):
                    given.arguments[name] = value.clone()


class CudaReceiver(Reload, IPCWeightTransferEngine):
    """vLLM's own, whose handles come as plain values: nothing is unpickled."""

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
    size, stride, offset, dtype, *rest = values
    shape = torch.Size(size)
    return (torch.Tensor, shape, tuple(stride), offset, torch.storage.TypedStorage, getattr(torch, dtype), *rest)


WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemoryReceiver)
WeightTransferEngineFactory.register_engine(CUDA_IPC, CudaReceiver)
# Workers inherit that signals are blocked (`engine._surroundings`). Until the engine is ready they need this one:
# by it, an engine that cannot be started ends them.
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
if OWNER in os.environ:
    end_with(int(os.environ[OWNER]))
