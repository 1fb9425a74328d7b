"""The learner's weights as an engine takes them: whole, merged, under the names of the checkpoint, one at a time.

The learner is only read. An adapted layer is merged by peft, on a twin of it with weights of its own, so nothing
has to be put back, whatever the consumer does. Where weights are sharded, each is gathered when it is asked for:
all ranks must ask for the same ones.
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

from coordexp.sharding import is_sharded

# Wrappers by torch.compile and activation checkpointing, which no checkpoint knows of.
_UNNAMED = ("_orig_mod", "_checkpoint_wrapped_module")


def learner_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """In the order of the modules. What two modules share comes once, under the name of the first."""
    is_sharded(model)  # refuses what cannot be gathered
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    return _weights(model.get_base_model() if isinstance(model, PeftModel) else model, "", {})


def _weights(module: Module, prefix: str, given: dict[Parameter, str]) -> Iterator[tuple[str, Tensor]]:
    """`given` are the learner's weights that have been given, with their names."""
    if isinstance(module, TrainableTokensWrapper):
        module = module.token_adapter
    if isinstance(module, LoraLayer | TrainableTokensLayer):
        yield from _adapted(module, prefix, given)
        return
    assert not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper), type(module)
    for name, weight in module.named_parameters(recurse=False):
        if weight not in given:
            given[weight] = prefix + name
            yield prefix + name, whole(weight)
    for name, child in module.named_children():
        yield from _weights(child, prefix if name in _UNNAMED else f"{prefix}{name}.", given)


def _adapted(
    layer: LoraLayer | TrainableTokensLayer, prefix: str, given: dict[Parameter, str]
) -> Iterator[tuple[str, Tensor]]:
    own = dict(layer.get_base_layer().named_parameters())
    tied = [given[weight] for weight in own.values() if weight in given]
    if tied and isinstance(layer, TrainableTokensLayer) and layer.tied_adapter:
        return
    if tied:
        raise ValueError(
            f"{prefix}weight is tied to {tied[0]} and adapted on its own: merged, they are two different weights\n"
            "  choose model.adapter.targets that leave both out (their coordinate rows are trained anyway)"
        )
    given.update((weight, prefix + name) for name, weight in own.items())
    for name, weight in _merged(layer).items():
        yield prefix + name, weight


@torch.no_grad()
def _merged(layer: LoraLayer | TrainableTokensLayer) -> dict[str, Tensor]:
    twin = _twin(layer)
    base = twin.get_base_layer()
    if isinstance(twin, TrainableTokensLayer):
        return {"weight": twin.get_merged_weights(twin.active_adapters)}
    for weight in base.parameters():
        weight.data = weight.data.clone()  # LoRA is added in place
    twin.merged_adapters, twin._caches = [*layer.merged_adapters], {}
    twin.merge()  # the safe way would round the update to bfloat16 before it is added
    return {name: weight.data for name, weight in base.named_parameters()}


def _twin(module: Any) -> Any:
    """A module with modules and parameters of its own, which hold the same weights."""
    twin = copy.copy(module)
    twin._parameters = {
        name: weight if weight is None else Parameter(whole(weight), requires_grad=False)
        for name, weight in module._parameters.items()
    }
    twin._modules = {name: _twin(child) for name, child in module._modules.items()}
    return twin


def whole(weight: Tensor) -> Tensor:
    """Return the weight without its gradient. A sharded one is gathered, in which all ranks must take part."""
    weight = weight.detach()
    if not isinstance(weight, DTensor):
        return weight
    mesh = weight.device_mesh
    here = weight.to_local().to(mesh.device_type)  # it may be waiting in the memory of the host
    shard = DTensor.from_local(
        here, mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
    return shard.full_tensor()
