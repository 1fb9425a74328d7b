"""Estimate the memory of learners and engines on a GPU, part by part. All estimates of the package are made here.

The formulas count the tensors that autograd keeps for a backward pass, from the code of Qwen3-VL in transformers.
`tests/unit/launch/test_memory_measured.py` compares them with the tensors that real training steps of small models
keep on a CPU. Nothing was measured on a GPU: what CUDA, NCCL and vLLM need beside tensors are the constants below.
This module imports no torch.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordexp.config import Settings
from coordexp.config.rollout import ENGINE_STEP_TOKENS
from coordexp.config.settings import Adapter
from coordexp.families import is_frozen
from coordexp.shapes import COORDINATES, ModelShape, WeightShapes, count_parameters

GIB = 2**30
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FLOAT32 = 4
# Bytes of optimizer states per trained parameter. Optimizers that are not listed count as AdamW does.
STATE_BYTES = {
    "adafactor": 0,
    "sgd": 0,
    "rmsprop": 4,
    "adagrad": 4,
    "lion_32bit": 4,
    "adamw_torch_8bit": 2,
    "adamw_bnb_8bit": 2,
    "adamw_8bit": 2,
    "lion_8bit": 1,
    "adamw_torch_4bit": 1,
}
ADAMW_STATES = 8
OPTIMIZER_STATES = "optimizer states"
CHUNK_LOGITS = 32 * 2**20  # logits that the loss has in memory at once (`objective.split.PROJECTED`)
PROMPT_TOKENS = 40  # of a prompt, beside its image
# Assumptions about CUDA, NCCL and vLLM, which no formula gives.
CONTEXT_BYTES = int(0.6 * GIB)  # the CUDA context of a process, its libraries and its communicators
GRAPH_BYTES = int(0.7 * GIB)  # the CUDA graphs of an engine
RESERVE = 0.05  # share of a GPU that the learner's allocator loses to fragmentation


@dataclass(frozen=True)
class Item:
    """The bytes of one part of the memory on a GPU."""

    name: str
    bytes: float


@dataclass(frozen=True)
class Moment:
    """The memory that a process holds at one moment, beside what it always holds."""

    name: str
    items: tuple[Item, ...]

    @property
    def bytes(self) -> float:
        return sum(item.bytes for item in self.items)


@dataclass(frozen=True)
class LearnerMemory:
    """The memory of one learner process: what it always holds, and what it holds at the moments of a step. The
    moments of training include the gradients, which a step removes at its end."""

    kept: tuple[Item, ...]
    gradients: Item
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The moment with the most memory."""
        return max(self.moments, key=_moment_bytes)

    @property
    def items(self) -> tuple[Item, ...]:
        """All parts of the memory at the peak."""
        return (*self.kept, *self.peak.items)

    @property
    def bytes(self) -> float:
        return sum(item.bytes for item in self.items)

    @property
    def least_bytes(self) -> float:
        """The memory without everything that depends on the size of rows."""
        return sum(item.bytes for item in self.kept) + self.gradients.bytes


@dataclass(frozen=True)
class RowSize:
    """The size of one forward pass: all tokens of the row, those of images, and the supervised positions."""

    tokens: int
    image_tokens: int
    supervised: int


@dataclass(frozen=True)
class LearnerSetup:
    """How the learner trains. `weight_bytes` and `compute_bytes` are those of one number; with 16-bit computation
    on float32 weights, autocast makes copies of the weights. `norm_bytes` are those of the input of a LayerNorm:
    autocast computes it with 16 bits on a CPU, and in float32 on a GPU."""

    weight_bytes: int
    compute_bytes: int
    norm_bytes: int
    trained: int  # parameters
    adapter: Adapter | None
    checkpointing: bool
    optimizer: str
    ranks: int
    is_sharded: bool  # weights, gradients and optimizer states are spread over the ranks (FSDP)
    frozen: tuple[str, ...] = ()  # parts that are not trained, as in `model.freeze`

    @classmethod
    def from_settings(cls, settings: Settings, weights: WeightShapes, ranks: int) -> "LearnerSetup":
        """Return the setup of a learner on a GPU that trains a model with these weights."""
        training, adapter, frozen = settings.training, settings.model.adapter, settings.model.freeze
        weight_bytes = BYTES[settings.learner_dtype]
        compute = 2 if training.bf16 or training.fp16 else weight_bytes
        return cls(
            weight_bytes=weight_bytes,
            compute_bytes=compute,
            norm_bytes=FLOAT32 if training.bf16 or training.fp16 else compute,
            trained=count_trained(weights, adapter, frozen),
            adapter=adapter,
            checkpointing=training.gradient_checkpointing,
            optimizer=training.optim,
            ranks=ranks,
            is_sharded=bool(training.fsdp),
            frozen=frozen,
        )

    @property
    def trains_vision(self) -> bool:
        return "vision" not in self.frozen

    @property
    def trains_images(self) -> bool:
        """True if the backward pass reaches the vision tower or its mergers."""
        return self.trains_vision or "aligner" not in self.frozen

    @property
    def has_casts(self) -> bool:
        """True if autocast makes copies with fewer bits of the weights."""
        return self.compute_bytes < self.weight_bytes

    @property
    def shards(self) -> int:
        return self.ranks if self.is_sharded else 1


def count_trained(weights: WeightShapes, adapter: Adapter | None, frozen: Sequence[str] = ()) -> int:
    """Return the number of trained parameters."""
    open_weights = {name: size for name, size in weights.items() if not is_frozen(name, frozen)}
    return count_parameters(open_weights) if adapter is None else adapter_parameters(adapter, open_weights)


def adapter_parameters(adapter: Adapter, weights: WeightShapes) -> int:
    """Return the number of parameters of an adapter, and of the rows of coordinate tokens if they are trained."""
    targets = adapter_targets(adapter, weights)
    count = sum(adapter.rank * sum(size) + (size[0] if adapter.dora else 0) for size in targets.values())
    if adapter.train_coord_rows:
        count += sum(COORDINATES * size[1] for size in _vocabulary_weights(weights).values())
    return count


def adapter_targets(adapter: Adapter, weights: WeightShapes) -> dict[str, tuple[int, ...]]:
    """Return the weights that get an adapter, chosen as peft does."""
    linear: dict[str, tuple[int, ...]] = {
        name: size
        for name, size in weights.items()
        if name.endswith(".weight") and len(size) == 2 and "embed" not in name and "lm_head" not in name
    }
    if adapter.targets == "all-linear":
        return linear
    return {
        name: size for name, size in linear.items() if re.fullmatch(adapter.targets, name.removesuffix(".weight"))
    }


# The learner


def learner_memory(shape: ModelShape, weights: WeightShapes, setup: LearnerSetup, row: RowSize) -> LearnerMemory:
    """Return the memory of one learner process in a step with rows of this size. The CUDA context and the
    allocator's reserve come on top."""
    parameters = count_parameters(weights)
    states = setup.trained * STATE_BYTES.get(setup.optimizer, ADAMW_STATES) / setup.shards
    kept = [Item(f"weights ({setup.weight_bytes} bytes each)", parameters * setup.weight_bytes / setup.shards)]
    if setup.adapter is not None:
        kept.append(Item("adapter (float32)", setup.trained * FLOAT32 / setup.shards))
    kept.append(Item(OPTIMIZER_STATES, states))
    if setup.ranks > 1 and not setup.is_sharded:
        kept.append(Item("gradient buckets of DDP", setup.trained * FLOAT32))
    gradients = Item("gradients (float32)", setup.trained * FLOAT32 / setup.shards)
    moments = [
        Moment(moment.name, (gradients, *(item for item in moment.items if item.bytes)))
        for moment in _moments(shape, weights, setup, row)
    ]
    return LearnerMemory(tuple(kept), gradients, tuple(moments))


def _moments(shape: ModelShape, weights: WeightShapes, setup: LearnerSetup, row: RowSize) -> list[Moment]:
    """Return the moments of a step at which the memory may be at its peak."""
    text, vision = shape.text, shape.vision
    tokens, patches = row.tokens, row.image_tokens * vision.patches_per_token
    layer = text_layer_bytes(shape, setup) * tokens
    block = vision_block_bytes(shape, setup) * patches
    images = Item("images of a row", patches * vision.patch_values * (FLOAT32 + _patch_copy_bytes(setup)))
    merged = merger_bytes(shape, setup) * patches if setup.trains_images else 0
    last_norm = text.hidden * tokens * (FLOAT32 if setup.adapter else 2 * FLOAT32)
    if setup.checkpointing:
        text_kept = text.layers * text.hidden * tokens * setup.weight_bytes
        vision_kept = vision.depth * vision.hidden * patches * setup.compute_bytes
    else:
        text_kept, vision_kept = text.layers * layer, vision.depth * block
    if not setup.trains_vision:
        block = vision_kept = 0
    held = (
        images,
        Item("activations of the language model", text_kept + last_norm),
        Item("activations of the vision tower", vision_kept + merged),
    )
    cached = {name: size for name, size in weights.items() if not is_frozen(name, setup.frozen)}
    copies = Item("16-bit copies of the weights", _cast_bytes(cached, setup))
    # With checkpointing, only the copies of weights outside of layers and blocks are kept for the backward pass.
    outside = {name: size for name, size in cached.items() if not _is_in_layer(name) and "visual" in name}
    kept_copies = replace(copies, bytes=_cast_bytes(outside, setup)) if setup.checkpointing else copies
    again = 1 if setup.checkpointing else 0  # a layer whose activations are computed again
    loss = Item("loss", loss_bytes(shape, row.supervised, setup))
    gathered = _gathered(shape, weights, setup)
    head = Item("gradient of the head", _head_gradient_bytes(shape, setup))
    rows = _row_copies(shape, setup)
    one_layer = Item("backward pass of a layer", again * layer + text_backward_bytes(shape, setup) * tokens)
    through_block = vision_backward_bytes(shape, setup) * patches if setup.trains_vision else 0
    one_block = Item("backward pass of a block", again * block + through_block)
    layer_weights = Item("weights of a layer", _layer_transient_bytes(shape, setup))
    moments = [
        Moment("end of the forward pass", (*held, copies, rows, *gathered)),
        Moment("loss", (*held, kept_copies, loss, head, rows, *gathered)),
        Moment("backward pass of a layer", (*held, kept_copies, one_layer, layer_weights, *gathered)),
        Moment("backward pass of the vision tower", (images, held[2], one_block, *gathered)),
    ]
    if setup.optimizer == "adamw_torch":  # torch's default for CUDA computes on lists of tensors, with one copy
        copy_bytes = setup.trained * FLOAT32 / setup.shards
        moments.append(Moment("optimizer step", (Item("temporary copy of the optimizer", copy_bytes),)))
    return moments


def text_layer_bytes(shape: ModelShape, setup: LearnerSetup) -> int:
    """Return the bytes per token that autograd keeps of one layer of the language model.

    Whole weights: the two residuals and the two normalised ones are float32; with autocast, each of five linear
    layers keeps its own 16-bit copy of its input. With an adapter, the norms are frozen and keep only their
    float32 input, and every linear layer's adapter keeps a copy of its input."""
    text, compute = shape.text, setup.compute_bytes
    low_rank = 0
    if setup.adapter is not None:
        hidden, queries, keys = 2 * FLOAT32 + 5 * compute, FLOAT32 + 3 * compute, FLOAT32 + 2 * compute
        low_rank = 7 * setup.adapter.rank * compute
    elif setup.has_casts:
        hidden, queries, keys = 4 * FLOAT32 + 5 * compute, FLOAT32 + 4 * compute, FLOAT32 + 3 * compute
    else:
        hidden, queries, keys = 6 * compute, 5 * compute, 4 * compute
    middle = 4 * compute  # gate, its activation, up, and their product
    return text.hidden * hidden + text.queries * queries + text.keys * keys + text.intermediate * middle + low_rank


def text_backward_bytes(shape: ModelShape, setup: LearnerSetup) -> int:
    """Return the bytes per token of the gradients inside one layer of the language model, at their largest: in the
    MLP, where the gradients of gate and up exist at once."""
    text, compute = shape.text, setup.compute_bytes
    through_adapter = FLOAT32 if setup.adapter else 0  # peft converts the inputs of adapters to float32
    hidden = text.hidden * (FLOAT32 + compute + through_adapter)
    return text.intermediate * (2 * compute + through_adapter) + hidden


def vision_block_bytes(shape: ModelShape, setup: LearnerSetup) -> int:
    """Return the bytes per patch that autograd keeps of one block of the vision tower."""
    vision, compute = shape.vision, setup.compute_bytes
    low_rank = 4 * setup.adapter.rank * compute if setup.adapter else 0
    return 2 * vision.intermediate * compute + vision.hidden * (2 * setup.norm_bytes + 9 * compute) + low_rank


def vision_backward_bytes(shape: ModelShape, setup: LearnerSetup) -> int:
    """Return the bytes per patch of the gradients inside one block of the vision tower, at their largest."""
    vision = shape.vision
    return vision.intermediate * setup.compute_bytes + 2 * vision.hidden * FLOAT32


def merger_bytes(shape: ModelShape, setup: LearnerSetup) -> int:
    """Return the bytes per patch that autograd keeps of all mergers. They are not checkpointed."""
    vision, compute = shape.vision, setup.compute_bytes
    mergers = len(vision.deepstack) + 1
    casts = setup.norm_bytes if setup.norm_bytes > compute else 0
    return mergers * vision.hidden * (3 * compute + casts)


def loss_bytes(shape: ModelShape, supervised: int, setup: LearnerSetup) -> float:
    """Return the bytes of the loss of a row. The head and the loss run in chunks of positions.

    It holds the hidden states of all supervised positions, their coordinate logits in float32, and for one chunk
    the logits and their gradient, and two copies of them in float32."""
    text = shape.text
    chunk = min(CHUNK_LOGITS, supervised * text.vocabulary)
    hidden = supervised * text.hidden * setup.compute_bytes
    return hidden + supervised * COORDINATES * FLOAT32 + 2 * chunk * (setup.compute_bytes + FLOAT32)


def _head_gradient_bytes(shape: ModelShape, setup: LearnerSetup) -> float:
    """Return the bytes of the head's gradient before it is added to those of earlier rows. Autocast makes it with
    16 bits and then converts it."""
    if setup.adapter is not None or setup.is_sharded:
        return 0.0
    numbers = shape.text.vocabulary * shape.text.hidden
    return numbers * (FLOAT32 + (setup.compute_bytes if setup.has_casts else 0))


def _row_copies(shape: ModelShape, setup: LearnerSetup) -> Item:
    """Return the trained coordinate rows in the data type of the embedding and of the head, and their gradient."""
    trains_rows = setup.adapter is not None and setup.adapter.train_coord_rows
    numbers = COORDINATES * shape.text.hidden if trains_rows else 0
    return Item("copies of coordinate rows", 3 * numbers * setup.weight_bytes)


def _vocabulary_weights(weights: WeightShapes) -> dict[str, tuple[int, ...]]:
    return {
        name: size for name, size in weights.items() if name.endswith(("embed_tokens.weight", "lm_head.weight"))
    }


def _cast_bytes(weights: WeightShapes, setup: LearnerSetup) -> float:
    """Return the bytes of the copies that autocast makes of the trained weights of linear layers, and keeps until
    the end of the forward pass. Without checkpointing, autograd keeps them for the backward pass. With FSDP, the
    gathered weights have 16 bits already."""
    if setup.adapter is not None:  # the base has few bits already, and the adapter is small
        return float(setup.trained * setup.compute_bytes) if setup.compute_bytes < FLOAT32 else 0.0
    if not setup.has_casts or setup.is_sharded:
        return 0.0
    numbers = sum(math.prod(size) for name, size in weights.items() if len(size) >= 2 and "pos_embed" not in name)
    return float(numbers * setup.compute_bytes)


def _patch_copy_bytes(setup: LearnerSetup) -> int:
    """Return the bytes per value of the copy of the patches that the first layer of the vision tower keeps."""
    return setup.compute_bytes if setup.has_casts and setup.trains_vision else 0


def _layer_transient_bytes(shape: ModelShape, setup: LearnerSetup) -> float:
    """Return the bytes of a layer's weights and gradients that exist only while its backward pass runs."""
    if setup.adapter is not None or setup.is_sharded:
        return 0.0
    text = shape.text
    if not setup.has_casts:
        return float(text.intermediate * text.hidden * FLOAT32)
    largest = text.intermediate * text.hidden * (FLOAT32 + setup.compute_bytes)
    whole = text.hidden * (2 * text.queries + 2 * text.keys + 3 * text.intermediate) * setup.compute_bytes
    return float(largest + (whole if setup.checkpointing else 0))


def _gathered(shape: ModelShape, weights: WeightShapes, setup: LearnerSetup) -> tuple[Item, ...]:
    """Return the weights that FSDP gathers from all ranks: two layers, and all that is not part of a layer, with
    their gradients."""
    if not setup.is_sharded:
        return ()
    inside = {name: size for name, size in weights.items() if _is_in_layer(name)}
    layers = {name: size for name, size in inside.items() if ".layers." in name}
    text_layer = count_parameters(layers) / shape.text.layers
    others = count_parameters(weights) - count_parameters(inside)
    return (Item("weights gathered from other ranks", 2 * (2 * text_layer + others) * setup.compute_bytes),)


def _is_in_layer(name: str) -> bool:
    return ".layers." in name or ".blocks." in name


def format_bytes(bytes: float) -> str:
    """Return a number of bytes as words, such as `1.5 GiB`."""
    return f"{bytes / GIB:.1f} GiB" if bytes >= GIB else f"{bytes / 2**20:.1f} MiB"


def _moment_bytes(moment: Moment) -> float:
    return moment.bytes


# The engine


@dataclass(frozen=True)
class EngineLoad:
    """The weights and requests that an engine has to hold. `sequences` is the number of requests that it decodes
    at once, `devices` the number of GPUs that share it."""

    weight_bytes: int
    devices: int
    sequences: int
    longest: int  # tokens of the longest sequence
    typical: int  # tokens of a request whose answer has the greatest length
    image_tokens: int  # of a request
    has_graphs: bool = True
    step_tokens: int = ENGINE_STEP_TOKENS  # that it computes at once
    has_small_cache: bool = False  # keys and values of 8 bits

    @classmethod
    def from_settings(cls, settings: Settings, image_tokens: int) -> "EngineLoad":
        """Return the load of the engine in the settings, with images of this size."""
        rollout = settings.rollout_matching
        devices = rollout.vllm.tensor_parallel_size or 1
        longest = rollout.vllm.max_model_len or settings.global_max_length or 0
        typical = min(longest, image_tokens + PROMPT_TOKENS + rollout.max_new_tokens)
        sequences = rollout.decode_batch_size * devices
        arguments = rollout.vllm.engine_args
        return cls(
            BYTES[settings.model.dtype],
            devices,
            sequences,
            longest,
            typical,
            image_tokens,
            has_graphs=not rollout.vllm.enforce_eager,
            step_tokens=arguments.max_num_batched_tokens or ENGINE_STEP_TOKENS,
            has_small_cache=arguments.kv_cache_dtype == "fp8",
        )


@dataclass(frozen=True)
class EngineMemory:
    """The memory of an engine on each of its GPUs: what it needs before it can have a KV cache, and the KV cache
    of one longest sequence and of all requests."""

    items: tuple[Item, ...]
    longest_bytes: float
    requests_bytes: float

    @property
    def fixed_bytes(self) -> float:
        return sum(item.bytes for item in self.items)

    @property
    def least_bytes(self) -> float:
        """The least with which the engine starts."""
        return self.fixed_bytes + self.longest_bytes


def engine_memory(shape: ModelShape, weights: WeightShapes, load: EngineLoad) -> EngineMemory:
    """Return the memory of an engine on each of its GPUs."""
    size, devices = load.weight_bytes, load.devices
    items = (
        Item("weights", count_parameters(weights) * size / devices),
        Item("encoder, for the largest image", encoder_bytes(shape, load)),
        Item("language model, one engine step", _engine_step_bytes(shape, load)),
        Item("CUDA graphs", GRAPH_BYTES if load.has_graphs else 0),
        Item("CUDA context", CONTEXT_BYTES),
    )
    per_token = cache_bytes(shape, load)
    requests = per_token * load.typical * load.sequences
    return EngineMemory(tuple(item for item in items if item.bytes), per_token * load.longest, requests)


def cache_bytes(shape: ModelShape, load: EngineLoad) -> float:
    """Return the bytes of the keys and values of one token on each GPU of an engine."""
    text, size = shape.text, 1 if load.has_small_cache else load.weight_bytes
    return 2 * text.layers * text.keys * size / min(load.devices, text.kv_heads)


def encoder_bytes(shape: ModelShape, load: EngineLoad) -> float:
    """Return the bytes with which vLLM encodes the largest image that the processor allows. It does so once at its
    start, and keeps that much free ever after.

    They are the patches as the processor returns them and in the engine's dtype, the widest point of one block,
    and the outputs for the language model, once as they are computed and once in the encoder cache."""
    vision, size = shape.vision, load.weight_bytes
    tokens = math.ceil(shape.largest_image / vision.pixels_per_token)
    patches = tokens * vision.patches_per_token
    widest = max(6 * vision.hidden, 2 * vision.intermediate) / load.devices + 2 * vision.hidden
    outputs = 2 * tokens * shape.text.hidden * (1 + len(vision.deepstack)) * size
    return patches * (vision.patch_values * (FLOAT32 + size) + widest * size) + outputs


def _engine_step_bytes(shape: ModelShape, load: EngineLoad) -> float:
    """Return the bytes of the widest point of a layer with as many tokens as one engine step has, of the logits of
    all requests, and of the buffers for deepstack features."""
    text, size = shape.text, load.weight_bytes
    widest = 3 * text.intermediate / load.devices + 4 * text.hidden
    deepstack = len(shape.vision.deepstack) * text.hidden
    logits = load.sequences * text.vocabulary * (size + 2 * FLOAT32)
    return load.step_tokens * (widest + deepstack) * size + logits


# Rollouts with transformers


def generation_moment(shape: ModelShape, setup: LearnerSetup, load: EngineLoad) -> Moment:
    """Return what the learner holds while its own model answers: the keys, as wide as its weights, the values, as
    wide as its computation, and the widest point of the first pass over the prompts."""
    text, vision, compute = shape.text, shape.vision, setup.compute_bytes
    cache = load.sequences * load.typical * text.layers * text.keys * (setup.weight_bytes + compute)
    patches = load.sequences * load.image_tokens * vision.patches_per_token
    block = patches * (2 * vision.intermediate + 6 * vision.hidden) * compute
    prompts = load.sequences * (load.image_tokens + PROMPT_TOKENS)
    layer = prompts * (3 * text.intermediate + 4 * text.hidden) * compute
    logits = load.sequences * text.vocabulary * 3 * FLOAT32
    return Moment("rollouts", (Item("KV cache", cache), Item("prompts and logits", max(block, layer) + logits)))
