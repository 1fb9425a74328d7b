"""Loads weights into the model of a vLLM worker: whole ones under the names of the checkpoint, or an adapter.

The engine in the learner's process and the workers of rollout servers use the same functions. Adapters come as
tensors; vLLM itself reads them from a folder. vLLM puts a wrapper around each layer that can have an adapter; the
names in a checkpoint do not include it.
"""

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from coordexp.errors import UserError
from coordexp.rollout.weights import check_finite

LIBC = ctypes.CDLL(None)
LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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
    """Loads weights under the names of the checkpoint into the model of a model runner, and checks at the end that
    none is missing. During an update, vLLM's LoRA wrappers are off the model."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.model, self.model_config = runner, runner.get_model(), runner.model_config
        self._wrappers: list[tuple[Module, str, Module]] = []

    def begin(self) -> None:
        self._wrappers = [
            (parent, name, child)
            for parent in self.model.modules()
            for name, child in parent.named_children()
            if isinstance(child, BaseLayerWithLoRA)
        ]
        for parent, name, wrapper in self._wrappers:
            setattr(parent, name, wrapper.base_layer)
        self._missing = {name for name, _ in self.model.named_parameters()}  # of tied parameters, only the first
        initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights, one after the other, each if it is finite. vLLM's reload keeps a layer's weights until the
        last of them has arrived, and then copies them."""
        current = ""

        def pass_on() -> Iterator[tuple[str, Tensor]]:
            nonlocal current
            for current, weight in weights:
                check_finite([(current, weight)])
                yield current, weight

        try:
            self._missing -= self.model.load_weights(pass_on())
        except UserError:
            raise
        except Exception as error:
            raise ValueError(f"at {current}: {str(error) or type(error).__name__}") from error

    @torch.no_grad()
    def finish(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack_again(self.model)
        self.wrap()
        if self._missing:
            some = ", ".join(sorted(self._missing)[:3])
            raise ValueError(f"{len(self._missing)} weights of the engine were not sent, among them {some}")

    def wrap(self) -> None:
        """Put the LoRA wrappers back after an update."""
        for parent, name, wrapper in self._wrappers:
            setattr(parent, name, wrapper)
        self._wrappers = []


def load_all(runner: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load whole weights into the model of a model runner of this process."""
    reload = Reload(runner)
    reload.begin()
    reload.load_weights(weights)
    reload.finish()


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
        start = end = 0
        if data.device.type == "cpu":  # the part that consists of whole pages of memory
            start = min(-data.data_ptr() % mmap.PAGESIZE, data.numel())
            end = start + (data.numel() - start) // mmap.PAGESIZE * mmap.PAGESIZE
        data[:start].zero_()
        data[end:].zero_()
        if start < end and LIBC.madvise(data.data_ptr() + start, end - start, mmap.MADV_DONTNEED):
            data[start:end].zero_()
    for device in {storage.device for storage in storages.values() if storage.device.type == "cuda"}:
        torch.cuda.synchronize(device)  # the engine may compute on another stream


def pack_again(model: torch.nn.Module) -> None:
    """Pack the weights of the output heads, and on a CPU those of the experts, as vLLM does when it starts.

    On a CPU both are packed for its kernels. The reload packs neither a head that is tied to the embedding nor
    experts that it has packed before (`_setup_kernel` of vLLM's UnquantizedFusedMoEMethod)."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        elif isinstance(module, RoutedExperts) and module.w13_weight.device.type == "cpu":
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
