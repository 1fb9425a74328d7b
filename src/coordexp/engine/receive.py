"""The engine's end of the weight transfer. Its workers import this module by name; the learner does not.

On GPUs, weights come through vLLM's CUDA IPC (`cuda_ipc`). On a CPU, for which vLLM has no transfer, they are read
from memory that the learner maps too. Adapters come as tensors; vLLM itself reads them from a folder. vLLM puts a
wrapper around each layer that can have an adapter, which the names in a checkpoint do not include.
"""

import ctypes
import mmap
import os
import signal
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_consumer
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from coordexp.engine.start import CUDA_IPC, OWNER, SHARED_MEMORY, end_with
from coordexp.engine.weights import MemoryFile, Metadata, check_finite, unflatten
from coordexp.errors import UserError

LIBC = ctypes.CDLL(None)
LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class EngineSide:
    """The methods that the owner of an engine calls in every worker, by name.

    A new adapter is received and built while the old one is in use, and then takes its place."""

    model_runner: Any
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

    def coordexp_read_adapter(self, address: tuple[int, int, int], metadatas: list[Metadata]) -> None:
        """Copy the adapter's tensors from a memory file of the owner."""
        file = MemoryFile.from_process(*address)
        self._adapter = {name: tensor.clone() for name, tensor in unflatten(metadatas, file.bytes)}

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


class Unwrapped:
    """Takes vLLM's LoRA wrappers off a model until `restore` is called, so that weights can be loaded under the
    names of the checkpoint."""

    def __init__(self, model: Module) -> None:
        self._wrappers = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if isinstance(child, BaseLayerWithLoRA)
        ]
        for parent, name, wrapper in self._wrappers:
            setattr(parent, name, wrapper.base_layer)

    def restore(self) -> None:
        for parent, name, wrapper in self._wrappers:
            setattr(parent, name, wrapper)
        self._wrappers = []


def plain_name(name: str) -> str:
    """Return the name of a parameter without the LoRA wrapper, as in the checkpoint."""
    return name.replace(".base_layer.", ".")


def build_adapter(manager: Any, tensors: Mapping[str, Tensor], config: dict[str, Any], id: int) -> LoRAModel:
    """Build an adapter with a worker's LoRA `manager`.

    Raise an error if a value is NaN or Inf, or if vLLM has no place for a module: vLLM by itself would generate
    without that module."""
    check_finite(tensors.items())
    helper = PEFTHelper.from_dict(config)
    helper.validate_legal(manager.lora_config)
    places = manager._adapter_manager
    mapper = getattr(places.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        id,
        dict(tensors),
        helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
    )
    known = {part for name in places.modules for part in places.packed_modules.get(name, [name])}
    if missing := sorted(adapter.loras.keys() - known):
        raise ValueError(f"{len(missing)} adapted modules have no place in vLLM, among them {missing[0]}")
    incomplete = [name for name, lora in adapter.loras.items() if lora.lora_a is None or lora.lora_b is None]
    if incomplete:
        raise ValueError(f"only one of the two matrices of {incomplete[0]} was sent")
    if not adapter.loras:
        raise ValueError("no weights of it were sent")
    return adapter


def replace_adapter(manager: Any, adapter: LoRAModel) -> None:
    """Use this adapter instead of the one before."""
    manager.remove_all_adapters()
    places = manager._adapter_manager
    places.add_adapter(adapter)
    places.activate_adapter(adapter.id)


class Reload:
    """Loads weights under the names of the checkpoint, and checks at the end that none is missing. During an
    update, vLLM's LoRA wrappers are off the model."""

    model: Any
    model_config: Any
    _unwrapped: Unwrapped | None = None

    def start_weight_update(self) -> None:
        self._unwrapped = Unwrapped(self.model)
        self._missing = {name for name, _ in self.model.named_parameters()}  # of tied parameters, only the first
        initialize_layerwise_reload(self.model)

    def load(self, bucket: Iterable[tuple[str, Tensor]], buffer: Tensor | None = None) -> None:
        """Load the weights of a bucket. If one of them is not finite, none of them is loaded.

        A later bucket overwrites the `buffer` that they are in. vLLM's reload keeps references to the weights of a
        layer until the last of them has arrived, which may be in a later bucket or at the end. Those that still
        point to the buffer are cloned."""
        weights, current = list(bucket), ""
        check_finite(weights)

        def pass_on() -> Iterator[tuple[str, Tensor]]:
            nonlocal current
            for current, weight in weights:  # noqa: UP028 - `current` names the weight that cannot be loaded
                yield current, weight

        try:
            self._missing -= self.model.load_weights(pass_on())
        except Exception as error:
            raise ValueError(f"at {current}: {str(error) or type(error).__name__}") from error

        start = buffer.untyped_storage().data_ptr() if buffer is not None else None
        for module in self.model.modules():
            for _, call in get_layerwise_info(module).loaded_weights:
                for name, value in call.arguments.items():
                    is_real = isinstance(value, Tensor) and not value.is_meta
                    if is_real and value.untyped_storage().data_ptr() == start:
                        call.arguments[name] = value.clone()

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack_again(self.model)
        self.wrap()
        if self._missing:
            some = ", ".join(sorted(self._missing)[:3])
            raise ValueError(f"{len(self._missing)} weights of the engine were not sent, among them {some}")

    def wrap(self) -> None:
        """Put the LoRA wrappers back after an update."""
        if self._unwrapped is not None:
            self._unwrapped.restore()
        self._unwrapped = None


def clear_kv_caches(caches: Iterable[Tensor | list[Tensor]]) -> None:
    """Set all bytes of an engine's KV caches to 0. A layer has one tensor, or a list of them.

    Attention multiplies the values in the unused slots of a block by a probability of 0, and 0 * NaN is NaN. So
    values that weights with NaN have left there would spoil later answers until the slots are written again. On a
    GPU this is a memset. On a CPU the pages are returned to the system, which provides zeros when they are used
    again; writing zeros would claim memory that the engine may never use."""
    tensors = [tensor for cache in caches for tensor in (cache if isinstance(cache, list) else [cache])]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
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
    """Return the start and the end of the part of the bytes that consists of whole pages of memory."""
    first = -data.data_ptr() % mmap.PAGESIZE
    length = max(0, data.numel() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    return (first, first + length) if length else (0, 0)


def pack_again(model: torch.nn.Module) -> None:
    """Pack the weights of the output heads, and on a CPU those of the experts, as vLLM does when it starts.

    On a CPU both are packed for its kernels. The reload packs neither a head that is tied to the embedding nor
    experts that it has packed before (`_setup_kernel` of vLLM's UnquantizedFusedMoEMethod)."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        elif isinstance(module, RoutedExperts) and module.w13_weight.device.type == "cpu":
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


@dataclass
class NothingToAgree(WeightTransferInitInfo):
    """Shared memory needs no information before the first update."""


@dataclass
class SharedUpdate(WeightTransferUpdateInfo):
    """The address of the learner's memory file, and the tensors of the bucket in it."""

    file: tuple[int, int, int]
    metadatas: list[Metadata]


class SharedMemoryReceiver(Reload, WeightTransferEngine[NothingToAgree, SharedUpdate]):
    init_info_cls, update_info_cls = NothingToAgree, SharedUpdate

    def init_transfer_engine(self, init_info: NothingToAgree) -> None:
        self._files: dict[tuple[int, int], MemoryFile] = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # vLLM's method would wait for an accelerator

    def receive_weights(self, update_info: SharedUpdate) -> None:
        buffer = self.map_file(*update_info.file).bytes
        self.load(unflatten(update_info.metadatas, buffer), buffer)

    def map_file(self, pid: int, fd: int, size: int) -> MemoryFile:
        if (pid, fd) not in self._files:
            self._files[pid, fd] = MemoryFile.from_process(pid, fd, size)
        file = self._files[pid, fd]
        if file.size != size:
            file.map(size)
        return file

    def shutdown(self) -> None:
        self._files = {}


class CudaReceiver(Reload, IPCWeightTransferEngine):
    """The receiver of vLLM, except that handles come as plain values: nothing is unpickled."""

    def parse_update_info(self, update_dict: dict[str, Any]) -> IPCWeightTransferUpdateInfo:
        handles = {device: cuda_handle(values) for device, values in update_dict["ipc_handles"].items()}
        return super().parse_update_info(update_dict | {"ipc_handles": handles})

    def receive_weights(self, update_info: IPCWeightTransferUpdateInfo) -> None:
        assert isinstance(update_info.ipc_handles, dict)
        self.load(
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
    """Return torch's handle of a shared tensor from the values of `cuda_ipc.plain_handle`."""
    size, stride, offset, dtype, *rest = values
    shape = torch.Size(size)
    return (torch.Tensor, shape, tuple(stride), offset, torch.storage.TypedStorage, getattr(torch, dtype), *rest)


WeightTransferEngineFactory.register_engine(SHARED_MEMORY, SharedMemoryReceiver)
WeightTransferEngineFactory.register_engine(CUDA_IPC, CudaReceiver)
if OWNER in os.environ:  # this is a process of an engine
    # Workers inherit blocked signals (`start._engine_environment`). Until the engine is ready they need SIGTERM:
    # vLLM ends them with it if the engine does not start.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with(int(os.environ[OWNER]))
