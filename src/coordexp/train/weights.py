"""The learner's weights in the form that an engine loads: whole, merged, named as in the checkpoint, one at a
time.

The learner itself is not changed. peft merges an adapted layer on a copy of the layer, and weights that merging
changes in place are copied too, so nothing has to be restored afterwards. Sharded weights are gathered one by one
as the caller iterates, so all ranks must iterate over the same ones.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from coordexp.errors import UserError
from coordexp.ranks import is_sharded

# Wrappers of torch.compile and activation checkpointing, which are not part of the names in a checkpoint.
_UNNAMED = ("_orig_mod", "_checkpoint_wrapped_module")


def learner_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of all weights, in the order of the modules. A weight that two modules share
    comes once, under the name of the first."""
    is_sharded(model)  # raises if the weights cannot be gathered
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    return _weights(model.get_base_model() if isinstance(model, PeftModel) else model, "", {})


def _weights(module: Module, prefix: str, names: dict[Parameter, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights below a module. `names` has the learner's weights that were yielded already."""
    if isinstance(module, TrainableTokensWrapper):
        module = module.token_adapter
    if isinstance(module, LoraLayer | TrainableTokensLayer):
        yield from _merge_and_yield(module, prefix, names)
        return
    assert not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper), type(module)
    for name, weight in module.named_parameters(recurse=False):
        if weight not in names:
            names[weight] = prefix + name
            yield prefix + name, gather_weight(weight)
    for name, child in module.named_children():
        yield from _weights(child, prefix if name in _UNNAMED else f"{prefix}{name}.", names)


def _merge_and_yield(
    layer: LoraLayer | TrainableTokensLayer, prefix: str, names: dict[Parameter, str]
) -> Iterator[tuple[str, Tensor]]:
    own = dict(layer.get_base_layer().named_parameters())
    tied = [names[weight] for weight in own.values() if weight in names]
    if tied and isinstance(layer, TrainableTokensLayer) and layer.tied_adapter:
        return
    if tied:
        raise UserError(
            f"{prefix}weight is tied to {tied[0]} but has its own adapter: merged, they would be two weights",
            "choose model.adapter.targets that leave both out (their coordinate rows are trained anyway)",
        )
    names.update((weight, prefix + name) for name, weight in own.items())
    for name, weight in _merge(layer).items():
        yield prefix + name, weight


@torch.no_grad()
def _merge(layer: LoraLayer | TrainableTokensLayer) -> dict[str, Tensor]:
    twin = _copy_module(layer)
    base = twin.get_base_layer()
    if isinstance(twin, TrainableTokensLayer):
        return {"weight": twin.get_merged_weights(twin.active_adapters)}
    for weight in base.parameters():
        weight.data = weight.data.clone()  # LoRA is added in place
    twin.merged_adapters, twin._caches = [*layer.merged_adapters], {}
    twin.merge()  # peft's safe_merge would round the update to bfloat16 before adding it
    return {name: weight.data for name, weight in base.named_parameters()}


def _copy_module(module: Any) -> Any:
    """Return a module with its own submodules and parameters, which hold the same weights."""
    twin = copy.copy(module)
    twin._parameters = {
        name: weight if weight is None else Parameter(gather_weight(weight), requires_grad=False)
        for name, weight in module._parameters.items()
    }
    twin._modules = {name: _copy_module(child) for name, child in module._modules.items()}
    return twin


def gather_weight(weight: Tensor) -> Tensor:
    """Return the whole weight without its gradient. If it is sharded, all ranks must call this."""
    weight = weight.detach()
    if not isinstance(weight, DTensor):
        return weight
    mesh = weight.device_mesh
    here = weight.to_local().to(mesh.device_type)  # it may be offloaded to host memory
    shard = DTensor.from_local(
        here, mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
    return shard.full_tensor()
