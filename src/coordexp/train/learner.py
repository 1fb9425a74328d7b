"""The learner of one rank: the model that is trained, its optimizer, and what others may read of them.

An engine gets the weights whole, merged, named as in the checkpoint, one at a time. The learner itself is not
changed by that: peft merges an adapted layer on a copy of the layer, and weights that merging changes in place are
copied too, so nothing has to be restored afterwards. Sharded weights are gathered one by one as the caller
iterates, so all ranks must iterate over the same ones.
"""

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Embedding, Module, Parameter
from torch.nn.functional import embedding, linear
from transformers import AutoProcessor, TrainingArguments

from coordexp.answers.formats import NOTE_FILE
from coordexp.config import Settings
from coordexp.config.settings import Adapter
from coordexp.data import BINS
from coordexp.errors import UserError
from coordexp.families import PARTS, is_frozen, load_model, to_checkpoint_weights
from coordexp.files import write_whole
from coordexp.objective.attention import attention_for
from coordexp.objective.split import SplittingHead
from coordexp.ranks import is_sharded
from coordexp.rollout.backend import AdapterWeights
from coordexp.train.offload import offload_learner


class Learner:
    """Made before the rollout backend and the trainer, which both refer to it. `base` is the checkpoint's model,
    inside peft's wrapper if there is an adapter, and `head` is its vocabulary projection. accelerate wraps `model`
    and `optimizer` when training begins; the trainer then sets them here. `dtype` is the one that engines and
    checkpoints' users get, `precision` the one that forward passes compute in."""

    optimizer: Any = None

    def __init__(
        self, settings: Settings, arguments: TrainingArguments, first_coord: int | None, note: dict[str, Any]
    ) -> None:
        """Load the model of the settings and add a new adapter, if they have one. `first_coord` is None if the
        model has no coordinate tokens. `note` has what a user of a checkpoint has to know, e.g. the prompt."""
        adapter, frozen, loaded_dtype = settings.model.adapter, settings.model.freeze, settings.learner_dtype
        self.device, self.dtype, self.note = arguments.device, settings.model.dtype, note
        self.precision = "bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else loaded_dtype
        self.base = load_model(
            Path(settings.model.path),
            dtype=getattr(torch, loaded_dtype),
            attn_implementation=attention_for(arguments.device, self.precision),
        )
        freeze_parts(self.base, frozen)
        self.model = with_adapter(self.base, adapter, first_coord, frozen)
        self.head = SplittingHead(self.base)
        # Whether every trained parameter can be expressed as a vLLM LoRA adapter.
        self.has_plain_adapter = adapter is not None and not adapter.train_coord_rows and not adapter.dora
        self._offload = settings.rollout_matching.offload

    def current_model(self) -> Any:
        return self.model

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, merged with the adapter, in the engine's data type. If they are sharded, every rank
        must iterate over all of them."""
        dtype = getattr(torch, self.dtype)
        return ((name, weight.to(dtype)) for name, weight in learner_weights(self.model))

    def adapter_weights(self) -> AdapterWeights:
        """Return the config and the weights of the adapter alone."""
        return learner_adapter(self.model)

    def offload(self) -> AbstractContextManager[None]:
        """Return a context in which model and optimizer are out of device memory, as the settings say."""
        return offload_learner(self._offload, self.model, self.optimizer)

    def describe(self, checkpoint: Path) -> None:
        """Write what users of a checkpoint need: the note, and in config.json the data type in which they should
        load the model. The weights themselves may be float32, so that a resumed run continues exactly. An adapter
        alone has no config.json."""
        write_whole(checkpoint / NOTE_FILE, json.dumps(self.note) + "\n")
        file = checkpoint / "config.json"
        if not file.is_file():
            return
        config = json.loads(file.read_text(encoding="utf-8"))
        for part in (config, *(value for value in config.values() if isinstance(value, dict))):
            if "dtype" in part:
                part["dtype"] = self.dtype
        write_whole(file, json.dumps(config, indent=2, sort_keys=True) + "\n")


# Wrappers of torch.compile and activation checkpointing, which are not part of the names in a checkpoint.
_UNNAMED = ("_orig_mod", "_checkpoint_wrapped_module")


def learner_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of all weights as in a checkpoint, in the order of the modules. A weight that two
    modules share comes once, under the name of the first."""
    is_sharded(model)  # raises if the weights cannot be gathered
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return (
        converted
        for name, weight in _weights(base, "", {})
        for converted in to_checkpoint_weights(base, name, weight).items()
    )


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


def freeze_parts(model: Any, parts: Sequence[str]) -> None:
    """Exclude parts of a model from training. Raise UserError if the model has no such part."""
    for part in parts:
        weights = [weight for name, weight in model.named_parameters() if is_frozen(name, (part,))]
        if not weights:
            raise UserError(
                f"model.freeze: {type(model).__name__} has no modules that are known as its {part}",
                f"remove {part} from model.freeze",
            )
        for weight in weights:
            weight.requires_grad_(False)


def with_adapter(model: Any, adapter: Adapter | None, first_coord: int | None, frozen: Sequence[str] = ()) -> Any:
    """Return the model with a new adapter, or the model itself if the settings have none. Frozen parts get no
    adapter."""
    if adapter is None:
        return model
    rows: dict[str, list[int]] = {}
    if adapter.train_coord_rows:
        assert first_coord is not None, "the rules of settings refuse coordinate rows without coordinate tokens"
        layers = ["embed_tokens"] if model.config.tie_word_embeddings else ["embed_tokens", "lm_head"]
        rows = {layer: [*range(first_coord, first_coord + BINS)] for layer in layers}
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        use_dora=adapter.dora,
        target_modules=adapter.targets,
        exclude_modules="|".join(PARTS[part] for part in frozen) or None,
        trainable_token_indices=rows or None,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    for module in adapted.modules():
        if isinstance(module, TrainableTokensLayer):
            module.__class__ = CoordRows
    return adapted


class CoordRows(TrainableTokensLayer):
    """The trained rows of the coordinate tokens, which replace those of an embedding or a vocabulary projection.

    peft's own layer makes a copy of the whole weight in every forward pass, and a gradient of the same size. This
    one looks up or projects the rows by themselves. They are neighbours, and there is one adapter."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        base, (adapter,) = self.get_base_layer(), self.active_adapters
        first, rows = self.token_indices[adapter][0], self.trainable_tokens_delta[adapter].to(base.weight.dtype)
        result: Tensor = base(x, *args, **kwargs)
        if isinstance(base, Embedding):
            is_coord = (x >= first) & (x < first + BINS)
            own = embedding((x - first).clamp(0, BINS - 1), rows)
            return torch.where(is_coord[..., None], own, result)
        result[..., first : first + BINS] = linear(x, rows)
        return result


def learner_adapter(model: Any) -> AdapterWeights:
    """Return the adapter's config and weights, named as in `adapter_config.json` and `adapter_model.safetensors`.
    If the learner is sharded, every rank must iterate over all weights: each is gathered from all ranks."""
    is_sharded(model)  # raises if the weights cannot be gathered
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    assert isinstance(model, PeftModel)
    config = model.peft_config[model.active_adapter]
    assert not config.trainable_token_indices, "rows that are trained beside the adapter would be left out"
    weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    plain = {name: _to_json_value(value) for name, value in config.to_dict().items()}
    return plain, ((name, gather_weight(weight)) for name, weight in weights.items())


def _to_json_value(value: Any) -> Any:
    """Return a JSON value. A set becomes a sorted list, so that equal sets are written alike."""
    if isinstance(value, Enum):
        return value.value
    return sorted(value) if isinstance(value, set) else value


def merge_adapter(base: Path, adapter: Path, to: Path) -> None:
    """Write a whole checkpoint whose weights include the adapter's update, for vLLM and for `coordexp predict`."""
    model = load_model(base, dtype="auto")
    merged = PeftModel.from_pretrained(model, adapter, torch_dtype=torch.float32).merge_and_unload()
    merged.save_pretrained(to)
    AutoProcessor.from_pretrained(adapter).save_pretrained(to)
    if (adapter / NOTE_FILE).is_file():
        shutil.copyfile(adapter / NOTE_FILE, to / NOTE_FILE)
