"""Adapters in the workers of an engine, colocated or in a rollout server. vLLM itself reads them from a folder;
here they come as tensors.

vLLM puts a wrapper around each layer that can have an adapter. The names in a checkpoint do not include it.
"""

import traceback
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from coordexp.errors import UserError
from coordexp.rollout.buckets import check_finite, read_tensors


class AdapterSide:
    """The methods that the owner of an engine calls in every worker, by name, to replace its adapter.

    A new adapter is received and built while the old one is in use, and then takes its place."""

    model_runner: Any
    _adapter: dict[str, Tensor]
    _built: Any

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

    def coordexp_read_adapter(self, contents: dict[str, Any]) -> None:
        """Copy the adapter's tensors from a memory file of the owner."""
        self._adapter = {name: tensor.clone() for name, tensor in read_tensors(contents)}

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
