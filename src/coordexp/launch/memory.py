"""The memory of a run on GPUs: one table of parts for each process, from formulas.

`coordexp plan` prints the tables, and `coordexp launch` refuses what cannot fit. The formulas count the tensors
that autograd keeps, from the code of Qwen3-VL in transformers. They are compared with real training steps of small
models (`tests/unit/launch/test_memory_measured.py`), and with PyTorch's own accounting of a 4B model
(`tests/integration/test_memory_of_4b.py`). Nothing was measured on a GPU: what CUDA, NCCL and vLLM need beside
tensors are constants. This module imports no torch.
"""

import math
import re
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
        self.shape, self.weights, self.row, self.ranks = model.shape, model.weights, row, ranks
        self.adapter, self.frozen = settings.model.adapter, settings.model.freeze
        self.optimizer, self.checkpointing = training.optim, training.gradient_checkpointing
        self.shards = ranks if training.fsdp else 1  # of weights, gradients and optimizer states
        self.weight_bytes = BYTES[settings.learner_dtype]  # of one number
        self.compute = 2 if training.bf16 or training.fp16 else self.weight_bytes
        self.casts = self.compute < self.weight_bytes  # autocast
        self.trained = self._count_trained()

    def at_rest(self) -> Parts:
        """Return what is there between two steps."""
        states = STATE_BYTES.get(self.optimizer, ADAMW_STATES)
        parts = {WEIGHTS: count_parameters(self.weights) * self.weight_bytes / self.shards}
        if self.adapter is not None:
            parts[ADAPTER] = self.trained * FLOAT32 / self.shards
        if self.ranks > self.shards:
            parts["gradient buckets of DDP"] = self.trained * FLOAT32
        return parts | {OPTIMIZER_STATES: self.trained * states / self.shards}

    def least(self) -> Parts:
        """Return what does not depend on the size of rows."""
        return self.at_rest() | {GRADIENTS: self.trained * FLOAT32 / self.shards}

    def parts(self) -> Parts:
        """Return all memory at the moment of a step at which it is the most: at the end of the forward pass, in
        the loss, in the backward pass of a layer, or in the optimizer."""
        held, layer = self._activations()
        copies = {COPIES: self._weight_copies()}
        kept = {ACTIVATIONS: held} | ({} if self.checkpointing else copies)
        if self.checkpointing:  # the weights of the layer that is computed again are copied again
            layer += copies[COPIES] / self.shape.text.layers
        moments = [kept | copies, kept | {LOGITS: self.loss_bytes()}, kept | {BACKWARD: layer}]
        if self.optimizer == "adamw_torch":  # on CUDA it computes on lists of tensors, with one copy
            moments.append({"temporary copy of the optimizer": self.trained * FLOAT32 / self.shards})
        gathered = {"weights gathered from other ranks": self._gathered_bytes()} if self.shards > 1 else {}
        peak = max(moments, key=total_bytes)
        return self.least() | gathered | {name: bytes for name, bytes in peak.items() if bytes}

    def generation(self, settings: Settings, image_tokens: int) -> Parts:
        """Return the memory while the model itself answers: the keys, as wide as its weights, the values, as wide
        as its computation, and the widest point of the first pass over the prompts."""
        text, vision, rollout = self.shape.text, self.shape.vision, settings.rollout_matching
        sequences, prompt = rollout.decode_batch_size, image_tokens + PROMPT_TOKENS
        cache = (prompt + rollout.max_new_tokens) * text.layers * text.keys * (self.weight_bytes + self.compute)
        block = image_tokens * vision.patches_per_token * (2 * vision.intermediate + 6 * vision.hidden)
        layer = prompt * (3 * text.intermediate + 4 * text.hidden)
        widest = max(block, layer) * self.compute + text.vocabulary * 3 * FLOAT32
        return self.at_rest() | {CACHE: float(sequences * cache), "prompts and logits": float(sequences * widest)}

    def loss_bytes(self) -> float:
        """Return the bytes of the loss, whose head runs in chunks of positions: the hidden states of all
        supervised positions, their coordinate logits in float32, for one chunk the logits, their gradient and
        copies of both in float32, and the head's gradient, which autocast makes with 16 bits and then converts."""
        text, supervised = self.shape.text, self.row.supervised
        chunk = min(CHUNK_LOGITS, supervised * text.vocabulary)
        head = 0 if self.adapter or self.shards > 1 else FLOAT32 + self.compute * self.casts
        positions = supervised * (text.hidden * self.compute + COORDINATES * FLOAT32)
        return positions + 2 * chunk * (self.compute + FLOAT32) + text.vocabulary * text.hidden * head

    def _count_trained(self) -> int:
        """Return the number of trained parameters. An adapter is on the linear layers that peft would choose."""
        weights = self._unfrozen()
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

    def _unfrozen(self) -> WeightShapes:
        return {name: size for name, size in self.weights.items() if not is_frozen(name, self.frozen)}

    def _activations(self) -> tuple[float, float]:
        """Return the bytes that are held at the end of the forward pass, and those that the backward pass of a
        layer adds. With checkpointing the input of every layer is held, and one layer is computed again."""
        text, vision, compute = self.shape.text, self.shape.vision, self.compute
        tokens, patches = self.row.tokens, self.row.image_tokens * vision.patches_per_token
        layer, block = self._layer_bytes(), self._block_bytes()
        of_layers, backward = text.layers * layer, 0
        if self.checkpointing:
            of_layers, backward, block = (
                text.layers * text.hidden * self.weight_bytes,
                layer,
                vision.hidden * compute,
            )
        pixel = FLOAT32 + compute * self.casts
        if "vision" in self.frozen:
            pixel, block = FLOAT32, 0
        # The gradients of gate and up exist at once. peft converts the inputs of adapters to float32.
        converted = FLOAT32 if self.adapter else 0
        backward += text.intermediate * (2 * compute + converted) + text.hidden * (FLOAT32 + compute + converted)
        norms = text.hidden * FLOAT32 * (1 if self.adapter else 2)  # around the last norm
        merger = 3 * compute + (FLOAT32 if compute < FLOAT32 else 0)  # with a LayerNorm in float32
        mergers = 0 if {"vision", "aligner"} <= {*self.frozen} else merger * (len(vision.deepstack) + 1)
        per_patch = vision.depth * block + vision.patch_values * pixel + vision.hidden * mergers
        return tokens * (of_layers + norms) + patches * per_patch, tokens * backward

    def _layer_bytes(self) -> int:
        """Return the bytes per token that autograd keeps of one layer of the language model.

        Whole weights: the two residuals and the two normalised ones are float32; with autocast, each of five
        linear layers keeps its own 16-bit copy of its input. With an adapter, the norms are frozen and keep only
        their float32 input, and every linear layer's adapter keeps a copy of its input."""
        text, compute, low_rank = self.shape.text, self.compute, 0
        if self.adapter is not None:
            hidden, queries, keys = 2 * FLOAT32 + 5 * compute, FLOAT32 + 3 * compute, FLOAT32 + 2 * compute
            low_rank = 7 * self.adapter.rank * compute
        elif self.casts:
            hidden, queries, keys = 4 * FLOAT32 + 5 * compute, FLOAT32 + 4 * compute, FLOAT32 + 3 * compute
        else:
            hidden, queries, keys = 6 * compute, 5 * compute, 4 * compute
        middle = 4 * compute * text.intermediate  # gate, its activation, up, and their product
        return text.hidden * hidden + text.queries * queries + text.keys * keys + middle + low_rank

    def _block_bytes(self) -> int:
        """Return the bytes per patch that autograd keeps of one block of the vision tower."""
        vision, low_rank = self.shape.vision, 4 * self.adapter.rank if self.adapter else 0
        values = 2 * vision.intermediate + 9 * vision.hidden + low_rank
        return values * self.compute + 2 * vision.hidden * FLOAT32

    def _weight_copies(self) -> float:
        """Return the bytes of autocast's 16-bit copies of trained weights: with checkpointing until the end of the
        forward pass. With FSDP the gathered weights have 16 bits already, and those of adapters are small."""
        if self.adapter is not None or self.shards > 1 or not self.casts:
            return 0.0
        matrices = {name: size for name, size in self._unfrozen().items() if len(size) >= 2}
        return float(count_parameters(matrices) * self.compute)

    def _gathered_bytes(self) -> float:
        """Return the bytes that FSDP gathers: two layers, the embedding and the head, with their gradients."""
        text = self.shape.text
        layer = count_parameters({name: size for name, size in self.weights.items() if ".layers.0." in name})
        embeddings = text.vocabulary * text.hidden * (1 if self.shape.tied else 2)
        return 2.0 * (2 * layer + embeddings) * self.compute


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
        CACHE: per_token * (vllm.max_model_len or settings.global_max_length or 0),
    }


@dataclass(frozen=True)
class GpuUse:
    """The parts of each process on each of several GPUs that do the same."""

    role: str
    gpus: tuple[int, ...]
    processes: dict[str, Parts]
    memory: float

    @property
    def total(self) -> float:
        return sum(map(total_bytes, self.processes.values()))

    @property
    def place(self) -> str:
        return f"GPU {self.gpus[0]}" if len(self.gpus) == 1 else f"GPUs {self.gpus[0]} to {self.gpus[-1]}"

    @property
    def fits(self) -> bool:
        return self.total <= self.memory


def choose_rollouts(settings: Settings) -> Rollouts:
    """Return how the settings make rollouts. Backends of other packages count as none."""
    if settings.backend == "vllm":
        return settings.rollout_matching.vllm.mode
    makes_none = not settings.uses_rollouts or settings.rollout_matching.noise.enabled
    return "hf" if settings.backend == "hf" and not makes_none else "none"


def plan_memory(
    settings: Settings, model: Model, sample: SampleSize, gpus: int, memory: float
) -> tuple[list[GpuUse], list[Finding]]:
    """Return the use of all GPUs, which have so many bytes each, and what does not fit. Servers get the first
    GPUs. An engine that sleeps while its learner trains takes turns with it, and each must fit."""
    rollouts, servers = choose_rollouts(settings), tuple(range(count_server_gpus(settings)))
    learners = tuple(range(len(servers), gpus))
    row = RowSize.from_settings(settings, sample, model.shape)
    learner = Learner(settings, model, row, len(learners))
    vllm, offload = settings.rollout_matching.vllm, settings.rollout_matching.offload
    context = {CONTEXT: float(CONTEXT_BYTES), "reserve for fragmentation": RESERVE * memory}
    training, engine, findings = learner.parts(), engine_parts(settings, model), list[Finding]()
    if rollouts == "hf":
        answering = learner.generation(settings, sample.image_tokens(settings, model.shape))
        training = max(training, answering, key=total_bytes)
    training |= context
    share = vllm.gpu_memory_utilization * memory
    if rollouts in ("server", "colocate"):
        if (least := total_bytes(engine)) > share:
            given = f"a share of {vllm.gpu_memory_utilization:g} of a GPU is {format_bytes(share)}"
            problem = f"the engine needs at least {format_bytes(least)}, and {given}"
            findings.append(Finding("error", UTILIZATION, problem, ENGINE_FIX))
        engine[CACHE] += max(0.0, share - least)
    uses = [GpuUse("learner", learners, {"learner": training}, memory)]
    if rollouts == "server":
        uses.insert(0, GpuUse("rollout server", servers, {"engine": engine}, memory))
    elif rollouts == "colocate" and not vllm.sleep:
        uses = [GpuUse("learner and engine", learners, {"learner": training, "engine": engine}, memory)]
    elif rollouts == "colocate":
        gone = {OPTIMIZER_STATES} if offload.enabled and offload.offload_optimizer else set()
        gone |= {WEIGHTS, ADAPTER} if offload.enabled and offload.offload_model else set()
        waiting = {name: bytes for name, bytes in (learner.at_rest() | context).items() if name not in gone}
        asleep = {"learner": training, "engine, asleep": {CONTEXT: float(CONTEXT_BYTES)}}
        uses = [
            GpuUse("learner, while the engine sleeps", learners, asleep, memory),
            GpuUse(
                "engine, while the learner waits",
                learners,
                {"learner, waiting": waiting, "engine": engine},
                memory,
            ),
        ]
    for use in uses:
        if not use.fits:
            problem = f"{use.role}: {format_bytes(use.total)} are needed, and a GPU has {format_bytes(memory)}"
            fix = SHARED_FIX if rollouts == "colocate" else LEARNER_FIX
            findings.append(Finding("error", "memory", problem, fix))
    return uses, findings


def count_server_gpus(settings: Settings) -> int:
    """Return the number of GPUs that the rollout servers of a config need."""
    vllm = settings.rollout_matching.vllm
    return len(vllm.server.servers) * vllm.devices_per_server if choose_rollouts(settings) == "server" else 0


def total_bytes(parts: Parts) -> float:
    return sum(parts.values())


def format_bytes(bytes: float) -> str:
    """Return a number of bytes as words, such as `1.5 GiB`."""
    return f"{bytes / GIB:.1f} GiB" if bytes >= GIB else f"{bytes / 2**20:.1f} MiB"
