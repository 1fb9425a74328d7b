"""Adapters in the workers of an engine, colocated or of a rollout server. vLLM's own way in is a folder on a disk;
here they come as tensors.

A model that vLLM has made ready for adapters has a wrapper around each layer that can have one, which a checkpoint
does not know of.
"""

import traceback
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from coordexp.rollout.buckets import check_finite
from coordexp.rollout.memory_file import read_tensors


class AdapterSide:
    """The methods that the owner of an engine may call in every worker, by name, to exchange its adapter.

    An adapter is received beside the one that answers are made with, built, and then put in its place."""

    model_runner: Any
    _adapter: dict[str, Tensor]
    _built: Any

    def coordexp_try(self, method: str, *arguments: Any) -> str | None:
        """Call another method of the worker. Return what went wrong, or None."""
        try:
            getattr(self, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - told to the owner
            traceback.print_exc()
            return str(error) or type(error).__name__
        return None

    def coordexp_read_adapter(self, contents: dict[str, Any]) -> None:
        """Copy the adapter's tensors out of a memory file of the owner."""
        self._adapter = {name: tensor.clone() for name, tensor in read_tensors(contents)}

    def coordexp_build_adapter(self, config: dict[str, Any], id: int) -> None:
        """Build vLLM's adapter from the tensors that were received. Answers are still made as before."""
        self._built = built(self.model_runner.lora_manager, self._adapter, config, id)
        self._adapter = {}

    def coordexp_use_adapter(self) -> None:
        adapter, self._built = self._built, None
        put_in_place(self.model_runner.lora_manager, adapter)

    def coordexp_forget_adapter(self) -> None:
        """Forget an adapter that was received or built and is not in use."""
        self._adapter, self._built = {}, None

    def coordexp_remove_adapter(self) -> None:
        self.coordexp_forget_adapter()
        self.model_runner.lora_manager.remove_all_adapters()


def built(manager: Any, tensors: Mapping[str, Tensor], config: dict[str, Any], id: int) -> LoRAModel:
    """What vLLM makes of an adapter, by a worker's LoRA `manager`. Nothing of it may be left out: vLLM by itself
    would answer without the modules that it has no place for. No value of it may be NaN or Inf."""
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
    if halves := [name for name, one in adapter.loras.items() if one.lora_a is None or one.lora_b is None]:
        raise ValueError(f"of {halves[0]} only one of the two matrices was sent")
    if not adapter.loras:
        raise ValueError("nothing was sent of it")
    return adapter


def put_in_place(manager: Any, adapter: LoRAModel) -> None:
    """Instead of the one before."""
    manager.remove_all_adapters()
    places = manager._adapter_manager
    places.add_adapter(adapter)
    places.activate_adapter(adapter.id)


class Unwrapped:
    """The model without the wrappers, from here until `back`: weights are taken in under the names of the
    checkpoint, as without them."""

    def __init__(self, model: Module) -> None:
        self._wrappers = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if isinstance(child, BaseLayerWithLoRA)
        ]
        for parent, name, wrapper in self._wrappers:
            setattr(parent, name, wrapper.base_layer)

    def back(self) -> None:
        for parent, name, wrapper in self._wrappers:
            setattr(parent, name, wrapper)
        self._wrappers = []


def plain_name(name: str) -> str:
    """Of a parameter, in the checkpoint's terms."""
    return name.replace(".base_layer.", ".")
