"""The memory of a run on GPUs: one table of parts for each process, from formulas.

`coordexp plan` prints the tables, and `coordexp launch` refuses what cannot fit. The formulas count the tensors
that autograd keeps, from the code of Qwen3-VL in transformers. They are compared with real training steps of small
models (`tests/unit/launch/test_memory_measured.py`), and with PyTorch's own accounting of a 4B model
(`tests/integration/test_memory_of_4b.py`). Nothing was measured on a GPU: what CUDA, NCCL and vLLM need beside
tensors are constants. This module imports no torch.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coordexp.config import Settings
from coordexp.config.rollout import ENGINE_STEP_TOKENS
from coordexp.errors import Finding
from coordexp.families import is_frozen
from coordexp.shapes import (
    COORDINATES,
    PUBLISHED,
    ModelShape,
    WeightShapes,
    count_parameters,
    expected_weights,
    read_shape,
    read_weights,
)

Parts = dict[str, float]  # the bytes of each part of a process on one GPU
Gpus = tuple[tuple[int, ...], tuple[int, ...]]  # those of servers, and those of learners
Rollouts = Literal["none", "hf", "colocate", "server"]  # with transformers; vLLM beside the learner or in servers

GIB = 2**30
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FLOAT32 = 4
# Bytes of optimizer states per trained parameter. Optimizers that are not listed count as AdamW does.
STATE_BYTES = {"adafactor": 0, "sgd": 0, "rmsprop": 4, "adagrad": 4, "lion_32bit": 4, "lion_8bit": 1}
STATE_BYTES |= {"adamw_torch_8bit": 2, "adamw_bnb_8bit": 2, "adamw_8bit": 2, "adamw_torch_4bit": 1}
ADAMW_STATES = 8
WEIGHTS, ADAPTER, GRADIENTS, OPTIMIZER_STATES = "weights", "adapter", "gradients", "optimizer states"
COPIES, ACTIVATIONS, BACKWARD = "16-bit copies of weights", "activations", "backward pass of a layer"
LOGITS, CACHE, CONTEXT = "logits and loss", "KV cache", "CUDA context"
CHUNK_LOGITS = 32 * 2**20  # logits that the loss has in memory at once (`objective.split.PROJECTED`)
PROMPT_TOKENS = 40  # of a prompt, beside its image
# Assumptions about CUDA, NCCL and vLLM, which no formula gives.
CONTEXT_BYTES = int(0.6 * GIB)  # the CUDA context of a process, its libraries and its communicators
GRAPH_BYTES = int(0.7 * GIB)  # the CUDA graphs of an engine
RESERVE = 0.05  # share of a GPU that the learner's allocator loses to fragmentation

UTILIZATION = "rollout_matching.vllm.gpu_memory_utilization"
LEARNER_FIX = "train an adapter (model.adapter), shard it (training.fsdp), or use a larger GPU"
ENGINE_FIX = (
    "raise vllm.gpu_memory_utilization, give each server more GPUs (vllm.tensor_parallel_size), or lower "
    "vllm.max_model_len"
)
SHARED_FIX = f"let the engine sleep (vllm.sleep), lower vllm.gpu_memory_utilization, {LEARNER_FIX}"


@dataclass(frozen=True)
class Model:
    """The shape of a model, and its weights."""

    shape: ModelShape
    weights: WeightShapes

    @classmethod
    def from_folder(cls, folder: Path) -> "Model":
        """Return the model in a checkpoint folder. Its weights are those in the headers of its files."""
        shape = read_shape(folder)
        return cls(shape, read_weights(folder) or expected_weights(shape))

    @classmethod
    def published(cls, size: str) -> "Model":
        """Return the published model of a size, with coordinate tokens."""
        shape = PUBLISHED[size].with_coordinate_tokens()
        return cls(shape, expected_weights(shape))


@dataclass(frozen=True)
class SampleSize:
    """The size of a typical sample of the data, which no config has."""

    pixels: int = 1_048_576
    answer_tokens: int = 350

    def image_tokens(self, settings: Settings, shape: ModelShape) -> int:
        return math.ceil(min(self.pixels, largest_image(settings, shape)) / shape.vision.pixels_per_token)


@dataclass(frozen=True)
class RowSize:
    """The size of one forward pass: all tokens of the row, those of images, and the supervised positions."""

    tokens: int
    image_tokens: int
    supervised: int

    @classmethod
    def from_settings(cls, settings: Settings, sample: SampleSize, shape: ModelShape) -> "RowSize":
        """Return the size of the largest row: a full one with packing, else the samples of one device."""
        longest, training = settings.global_max_length or 0, settings.training
        image = sample.image_tokens(settings, shape)
        length = min(longest, image + PROMPT_TOKENS + sample.answer_tokens)
        samples = max(1, longest // length) if training.packing else training.per_device_train_batch_size
        tokens = longest if training.packing else min(longest, samples * length)
        images = min(tokens, samples * image)
        return cls(tokens, images, min(tokens - images, samples * sample.answer_tokens))


def largest_image(settings: Settings, shape: ModelShape) -> int:
    """Return the number of pixels to which larger images are reduced."""
    return min(shape.largest_image, settings.model.max_pixels or shape.largest_image)


class Learner:
    """One learner process, and its memory in a step with rows of one size."""

    def __init__(self, settings: Settings, model: Model, row: RowSize, ranks: int = 1) -> None:
        training = settings.training
        self.model, self.row, self.ranks = model, row, ranks
        self.adapter, self.frozen = settings.model.adapter, settings.model.freeze
        self.optimizer, self.checkpointing = training.optim, training.gradient_checkpointing
        self.shards = ranks if training.fsdp else 1  # of weights, gradients and optimizer states
        self.weight_bytes = self.compute = self.norm = BYTES[settings.learner_dtype]  # of one number
        if training.bf16 or training.fp16:  # autocast: on a CPU it also computes a LayerNorm with 16 bits
            self.compute, self.norm = 2, 2 if training.use_cpu else FLOAT32
        self.copies_weights = self.compute < self.weight_bytes
        self.trained = self._count_trained()

    def at_rest(self) -> Parts:
        """Return what is there between two steps."""
        parts = {WEIGHTS: count_parameters(self.model.weights) * self.weight_bytes / self.shards}
        if self.adapter is not None:
            parts[ADAPTER] = self.trained * FLOAT32 / self.shards
        if self.ranks > self.shards:
            parts["gradient buckets of DDP"] = self.trained * FLOAT32
        return parts | {
            OPTIMIZER_STATES: self.trained * STATE_BYTES.get(self.optimizer, ADAMW_STATES) / self.shards
        }

    def least(self) -> Parts:
        """Return what does not depend on the size of rows."""
        return self.at_rest() | {GRADIENTS: self.trained * FLOAT32 / self.shards}

    def parts(self) -> Parts:
        """Return all memory at the moment of a step at which it is the most."""
        peak = max(self.moments(), key=total_bytes)
        return self.least() | {name: bytes for name, bytes in peak.items() if bytes}

    def activation_bytes(self) -> float:
        """Return the bytes of activations, and of what the backward pass of a layer adds, at their largest."""
        return max(parts.get(ACTIVATIONS, 0) + parts.get(BACKWARD, 0) for parts in self.moments())

    def _count_trained(self) -> int:
        """Return the number of trained parameters. An adapter is on the linear layers that peft would choose."""
        weights = {name: size for name, size in self.model.weights.items() if not is_frozen(name, self.frozen)}
        if self.adapter is None:
            return count_parameters(weights)
        targets = ".*" if self.adapter.targets == "all-linear" else self.adapter.targets
        count = 0
        for name, size in weights.items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                count += COORDINATES * size[1] * self.adapter.train_coord_rows
            elif len(size) == 2 and "embed" not in name and re.fullmatch(targets, name.removesuffix(".weight")):
                count += self.adapter.rank * sum(size) + size[0] * self.adapter.dora
        return count

    def moments(self) -> Iterator[Parts]:
        """Yield the memory beside `least` at the moments of a step that may need the most: the end of the forward
        pass, the loss, the backward pass of a layer and of a block of the vision tower, and the optimizer's."""
        text, vision, compute = self.model.shape.text, self.model.shape.vision, self.compute
        tokens, patches = self.row.tokens, self.row.image_tokens * vision.patches_per_token
        layer, block = self._layer_bytes() * tokens, self._block_bytes() * patches
        if self.checkpointing:  # the input of every layer is kept, and one layer is computed again
            held = text.layers * text.hidden * tokens * self.weight_bytes
            tower = vision.depth * vision.hidden * patches * compute
        else:
            held, tower, layer, block = text.layers * layer, vision.depth * block, 0, 0
        # In the backward pass of an MLP, the gradients of gate and up exist at once. peft converts the inputs of
        # adapters to float32.
        through_adapter = FLOAT32 if self.adapter else 0
        layer += text.intermediate * (2 * compute + through_adapter) * tokens
        layer += text.hidden * (FLOAT32 + compute + through_adapter) * tokens
        block += (vision.intermediate * compute + 2 * vision.hidden * FLOAT32) * patches
        if "vision" in self.frozen:
            tower = block = 0
        images = patches * vision.patch_values
        tower += images * (FLOAT32 + (compute if self.copies_weights and "vision" not in self.frozen else 0))
        if not {"vision", "aligner"} <= {*self.frozen}:  # the mergers, which are not checkpointed
            casts = self.norm if self.norm > compute else 0
            tower += (len(vision.deepstack) + 1) * vision.hidden * (3 * compute + casts) * patches
        held += tower + text.hidden * tokens * FLOAT32 * (1 if self.adapter else 2)  # with the last norm

        all_copies, kept_copies, layer_copies = self._weight_copies()
        shared = {"weights gathered from other ranks": self._gathered_bytes()} if self.shards > 1 else {}
        if self.adapter is not None and self.adapter.train_coord_rows:  # for the embedding and the head
            shared |= {"copies of coordinate rows": 3.0 * COORDINATES * text.hidden * self.weight_bytes}
        yield shared | {ACTIVATIONS: held, COPIES: all_copies}
        yield shared | {ACTIVATIONS: held, COPIES: kept_copies, LOGITS: self._loss_bytes()}
        yield shared | {ACTIVATIONS: held, COPIES: kept_copies, BACKWARD: layer + layer_copies}
        yield shared | {ACTIVATIONS: tower, BACKWARD: block}
        if self.optimizer == "adamw_torch":  # on CUDA it computes on lists of tensors, with one copy
            yield {"temporary copy of the optimizer": self.trained * FLOAT32 / self.shards}

    def _layer_bytes(self) -> int:
        """Return the bytes per token that autograd keeps of one layer of the language model.

        Whole weights: the two residuals and the two normalised ones are float32; with autocast, each of five
        linear layers keeps its own 16-bit copy of its input. With an adapter, the norms are frozen and keep only
        their float32 input, and every linear layer's adapter keeps a copy of its input."""
        text, compute, low_rank = self.model.shape.text, self.compute, 0
        if self.adapter is not None:
            hidden, queries, keys = 2 * FLOAT32 + 5 * compute, FLOAT32 + 3 * compute, FLOAT32 + 2 * compute
            low_rank = 7 * self.adapter.rank * compute
        elif self.copies_weights:
            hidden, queries, keys = 4 * FLOAT32 + 5 * compute, FLOAT32 + 4 * compute, FLOAT32 + 3 * compute
        else:
            hidden, queries, keys = 6 * compute, 5 * compute, 4 * compute
        middle = 4 * compute * text.intermediate  # gate, its activation, up, and their product
        return text.hidden * hidden + text.queries * queries + text.keys * keys + middle + low_rank

    def _block_bytes(self) -> int:
        """Return the bytes per patch that autograd keeps of one block of the vision tower."""
        vision, low_rank = self.model.shape.vision, 4 * self.adapter.rank if self.adapter else 0
        return (
            2 * vision.intermediate + 9 * vision.hidden + low_rank
        ) * self.compute + 2 * vision.hidden * self.norm

    def _loss_bytes(self) -> float:
        """Return the bytes of the loss, whose head runs in chunks of positions: the hidden states of all
        supervised positions, their coordinate logits in float32, for one chunk the logits, their gradient and
        copies of both in float32, and the head's gradient, which autocast makes with 16 bits and then converts."""
        text, supervised = self.model.shape.text, self.row.supervised
        chunk = min(CHUNK_LOGITS, supervised * text.vocabulary)
        head = 0 if self.adapter or self.shards > 1 else FLOAT32 + (self.compute if self.copies_weights else 0)
        positions = supervised * (text.hidden * self.compute + COORDINATES * FLOAT32)
        return positions + 2 * chunk * (self.compute + FLOAT32) + text.vocabulary * text.hidden * head

    def _weight_copies(self) -> tuple[float, float, float]:
        """Return the bytes of autocast's copies of trained weights at the end of the forward pass, of those that
        stay for the backward pass (with checkpointing, only what is outside of layers and blocks), and of those of
        one layer and of its largest gradient. With FSDP the gathered weights have 16 bits already."""
        text, compute = self.model.shape.text, self.compute
        if self.adapter is not None:
            small = float(self.trained * compute) if compute < FLOAT32 else 0.0
            return small, small, 0.0
        if self.shards > 1:
            return 0.0, 0.0, 0.0
        largest = float(text.intermediate * text.hidden)
        if not self.copies_weights:
            return 0.0, 0.0, largest * FLOAT32
        layer = text.hidden * (2 * text.queries + 2 * text.keys + 3 * text.intermediate) * compute
        cast = {
            name: float(math.prod(size) * compute)
            for name, size in self.model.weights.items()
            if len(size) >= 2 and "pos_embed" not in name and not is_frozen(name, self.frozen)
        }
        outside = sum(bytes for name, bytes in cast.items() if "visual" in name and ".blocks." not in name)
        copies, in_layer = sum(cast.values()), largest * (FLOAT32 + compute)
        return (copies, outside, in_layer + layer) if self.checkpointing else (copies, copies, in_layer)

    def _gathered_bytes(self) -> float:
        """Return the bytes that FSDP gathers: two layers, and all that is in none, with their gradients."""
        layers, outside = 0, 0
        for name, size in self.model.weights.items():
            if ".layers." in name:
                layers += math.prod(size)
            elif ".blocks." not in name:
                outside += math.prod(size)
        return 2 * (2 * layers / self.model.shape.text.layers + outside) * self.compute

    def generation(self, settings: Settings, image_tokens: int) -> Parts:
        """Return the memory while the model itself answers: the keys, as wide as its weights, the values, as wide
        as its computation, and the widest point of the first pass over the prompts."""
        text, vision, rollout = self.model.shape.text, self.model.shape.vision, settings.rollout_matching
        sequences, prompt = rollout.decode_batch_size, image_tokens + PROMPT_TOKENS
        cache = (prompt + rollout.max_new_tokens) * text.layers * text.keys * (self.weight_bytes + self.compute)
        block = image_tokens * vision.patches_per_token * (2 * vision.intermediate + 6 * vision.hidden)
        layer = prompt * (3 * text.intermediate + 4 * text.hidden)
        widest = max(block, layer) * self.compute + text.vocabulary * 3 * FLOAT32
        return self.at_rest() | {CACHE: float(sequences * cache), "prompts and logits": float(sequences * widest)}


def engine_parts(settings: Settings, model: Model) -> Parts:
    """Return the least memory with which an engine starts on each of its GPUs, with a KV cache for one sequence.

    vLLM encodes the largest image once at its start, and keeps that much free ever after: the patches as the
    processor returns them and in its own dtype, the widest point of one block, and the outputs for the language
    model, as they are computed and in the encoder cache. A step has the widest point of a layer, the logits of all
    requests, and the buffers for deepstack features."""
    text, vision, size = model.shape.text, model.shape.vision, BYTES[settings.model.dtype]
    rollout, vllm = settings.rollout_matching, settings.rollout_matching.vllm
    devices = vllm.tensor_parallel_size or 1
    tokens = math.ceil(largest_image(settings, model.shape) / vision.pixels_per_token)
    widest = max(6 * vision.hidden, 2 * vision.intermediate) / devices + 2 * vision.hidden
    encoder = tokens * vision.patches_per_token * (vision.patch_values * (FLOAT32 + size) + widest * size)
    encoder += 2 * tokens * text.hidden * (1 + len(vision.deepstack)) * size
    layer = 3 * text.intermediate / devices + (4 + len(vision.deepstack)) * text.hidden
    step = (vllm.engine_args.max_num_batched_tokens or ENGINE_STEP_TOKENS) * layer * size
    step += rollout.decode_batch_size * devices * text.vocabulary * (size + 2 * FLOAT32)
    cached = 1 if vllm.engine_args.kv_cache_dtype == "fp8" else size
    per_token = 2 * text.layers * text.keys * cached / min(devices, text.kv_heads)
    return {
        WEIGHTS: count_parameters(model.weights) * size / devices,
        "encoder, for the largest image": encoder,
        "language model, one engine step": step,
        "CUDA graphs": 0.0 if vllm.enforce_eager else GRAPH_BYTES,
        CONTEXT: CONTEXT_BYTES,
        CACHE: per_token * longest_sequence(settings),
    }


def longest_sequence(settings: Settings) -> int:
    return settings.rollout_matching.vllm.max_model_len or settings.global_max_length or 0


@dataclass(frozen=True)
class GpuUse:
    """The parts of each process on each of several GPUs that do the same."""

    role: str
    gpus: tuple[int, ...]
    processes: dict[str, Parts]
    memory: float

    @property
    def reserve(self) -> float:
        """What the allocator of a learner loses to fragmentation."""
        return RESERVE * self.memory if "learner" in self.processes else 0.0

    @property
    def total(self) -> float:
        return sum(map(total_bytes, self.processes.values())) + self.reserve

    @property
    def verdict(self) -> Literal["fits", "tight", "does not fit"]:
        """`tight` if the run fits only without the reserve."""
        if self.total <= self.memory:
            return "fits"
        return "tight" if self.total - self.reserve <= self.memory else "does not fit"

    @property
    def place(self) -> str:
        """The role and the GPUs in words."""
        numbers = f"GPU {self.gpus[0]}" if len(self.gpus) == 1 else f"GPUs {self.gpus[0]} to {self.gpus[-1]}"
        return f"{self.role}, {numbers}"


def choose_rollouts(settings: Settings) -> Rollouts:
    """Return how the settings make rollouts. Backends of other packages count as none."""
    if settings.backend == "vllm":
        return settings.rollout_matching.vllm.mode
    makes_none = not settings.uses_rollouts or settings.rollout_matching.noise.enabled
    return "hf" if settings.backend == "hf" and not makes_none else "none"


def plan_memory(
    settings: Settings, model: Model, sample: SampleSize, gpus: Gpus, memory: float
) -> tuple[list[GpuUse], list[Finding]]:
    """Return the use of all GPUs, which have so many bytes each, and what does not fit. An engine that sleeps
    while its learner trains takes turns with it, and each must fit."""
    (servers, learners), rollouts, findings = gpus, choose_rollouts(settings), list[Finding]()
    vllm, offload = settings.rollout_matching.vllm, settings.rollout_matching.offload
    image_tokens, context = sample.image_tokens(settings, model.shape), {CONTEXT: float(CONTEXT_BYTES)}
    learner = Learner(settings, model, RowSize.from_settings(settings, sample, model.shape), len(learners))
    training, engine = learner.parts(), engine_parts(settings, model)
    if rollouts == "hf":
        training = max(training, learner.generation(settings, image_tokens), key=total_bytes)
    processes = {"learner": training | context}
    uses = [GpuUse("learner", learners, processes, memory)]
    if rollouts in ("server", "colocate"):
        findings += _engine_findings(engine, settings, image_tokens, memory)
        engine[CACHE] += max(0.0, vllm.gpu_memory_utilization * memory - total_bytes(engine))
    if rollouts == "server":
        uses.insert(0, GpuUse("rollout server", servers, {"engine": engine}, memory))
    elif rollouts == "colocate" and not vllm.sleep:
        uses = [GpuUse("learner and engine", learners, processes | {"engine": engine}, memory)]
    elif rollouts == "colocate":
        gone = {OPTIMIZER_STATES} if offload.enabled and offload.offload_optimizer else set()
        gone |= {WEIGHTS, ADAPTER} if offload.enabled and offload.offload_model else set()
        waiting = {name: bytes for name, bytes in learner.at_rest().items() if name not in gone} | context
        active = {"learner, waiting": waiting, "engine": engine}
        uses = [
            GpuUse("learner, while the engine sleeps", learners, processes | {"engine, asleep": context}, memory),
            GpuUse("engine, while the learner waits", learners, active, memory),
        ]
    for use in uses:
        if use.verdict == "does not fit":
            problem = f"{use.total / GIB:.1f} GiB are needed, and a GPU has {use.memory / GIB:.1f} GiB"
            fix = SHARED_FIX if rollouts == "colocate" else LEARNER_FIX
            findings.append(Finding("error", "memory", f"{use.place}: {problem}", fix))
    return uses, findings


def _engine_findings(engine: Parts, settings: Settings, image_tokens: int, memory: float) -> Iterator[Finding]:
    """Yield an error if the engine's share of a GPU has no room for one sequence, and a warning if it has none for
    all requests at their greatest length."""
    rollout, utilization = settings.rollout_matching, settings.rollout_matching.vllm.gpu_memory_utilization
    least, longest, share = total_bytes(engine), longest_sequence(settings), utilization * memory
    typical = min(longest, image_tokens + PROMPT_TOKENS + rollout.max_new_tokens)
    sequences = rollout.decode_batch_size * (rollout.vllm.tensor_parallel_size or 1)
    room = (share - least + engine[CACHE]) / (engine[CACHE] / longest * typical * sequences)
    if least > share:
        given = f"a share of {utilization:g} of a GPU is {share / GIB:.1f} GiB"
        problem = f"the engine needs at least {least / GIB:.1f} GiB, and {given}"
        yield Finding("error", UTILIZATION, problem, ENGINE_FIX)
    elif room < 1:
        problem = f"the KV cache has room for {room:.0%} of the configured requests at their greatest length"
        fix = "raise gpu_memory_utilization, or lower decode_batch_size, max_new_tokens or max_model_len"
        yield Finding("warning", UTILIZATION, f"{problem}; the rest wait", fix)


def total_bytes(parts: Parts) -> float:
    return sum(parts.values())


def format_bytes(bytes: float) -> str:
    """Return a number of bytes as words, such as `1.5 GiB`."""
    return f"{bytes / GIB:.1f} GiB" if bytes >= GIB else f"{bytes / 2**20:.1f} MiB"
