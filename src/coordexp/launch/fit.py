"""Decide whether a run fits on GPUs, and what to change if it does not. `coordexp plan` prints the result.

The memory comes from `launch.memory`. This module divides the GPUs among servers and learners, adds up what they
need, and tries changes of single settings, and then of several, with the same formulas.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from coordexp.config import Settings
from coordexp.config.rollout import default_tensor_parallel_size
from coordexp.config.rules import MODE, TENSOR_PARALLEL
from coordexp.config.settings import Adapter
from coordexp.errors import Finding, UserError
from coordexp.launch.memory import (
    CONTEXT_BYTES,
    GIB,
    OPTIMIZER_STATES,
    PROMPT_TOKENS,
    RESERVE,
    EngineLoad,
    EngineMemory,
    Item,
    LearnerMemory,
    LearnerSetup,
    RowSize,
    engine_memory,
    generation_moment,
    learner_memory,
)
from coordexp.shapes import ModelShape, WeightShapes, expected_weights, read_shape, read_weights

Rollouts = Literal["none", "hf", "colocate", "server"]  # with transformers; vLLM beside the learner or in servers
Verdict = Literal["fits", "tight", "does not fit"]
SUGGESTIONS = 3
UTILIZATION = "rollout_matching.vllm.gpu_memory_utilization"
SHORTEST = 2048  # rows that are shorter than this are not suggested
# Settings that may be changed at once to make a run fit: one first, then two, then three.
MOST_CHANGES = 3
FEW = 4  # sequences that a device decodes at once, if memory is short


@dataclass(frozen=True)
class PlannedModel:
    """The model of a plan: its shape and its weights."""

    name: str
    shape: ModelShape
    weights: WeightShapes

    @classmethod
    def from_folder(cls, folder: Path) -> "PlannedModel":
        """Return the model in a checkpoint folder. Its weights are those in the headers of its files."""
        shape = read_shape(folder)
        return cls(str(folder), shape, read_weights(folder) or expected_weights(shape))

    @classmethod
    def from_shape(cls, name: str, shape: ModelShape) -> "PlannedModel":
        """Return a model of which only the shape is known."""
        return cls(name, shape, expected_weights(shape))


@dataclass(frozen=True)
class SampleSize:
    """The size of a typical sample of the data, which no config has."""

    pixels: int = 1_048_576
    answer_tokens: int = 350

    def image_tokens(self, shape: ModelShape) -> int:
        return math.ceil(min(self.pixels, shape.largest_image) / shape.vision.pixels_per_token)


@dataclass(frozen=True)
class GpuSplit:
    """The GPUs of rollout servers and those of learners. With servers, no GPU has both."""

    servers: tuple[int, ...]
    learners: tuple[int, ...]


@dataclass(frozen=True)
class GpuUse:
    """The memory on each of several GPUs that do the same."""

    role: str
    gpus: tuple[int, ...]
    sections: tuple[tuple[str, tuple[Item, ...]], ...]  # the parts of each process
    reserve: float
    memory: float

    @property
    def total(self) -> float:
        return sum(item.bytes for _, items in self.sections for item in items) + self.reserve

    @property
    def verdict(self) -> Verdict:
        """`tight` if the run fits only without the reserve."""
        if self.total <= self.memory:
            return "fits"
        return "tight" if self.total - self.reserve <= self.memory else "does not fit"


@dataclass(frozen=True)
class MemoryPlan:
    """The use of all GPUs, the engine's need if there is an engine, and the problems."""

    uses: tuple[GpuUse, ...]
    engine: EngineMemory | None
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all GPUs. An engine without room for one sequence does not fit."""
        if any(finding.severity == "error" for finding in self.findings):
            return "does not fit"
        return "tight" if any(use.verdict == "tight" for use in self.uses) else "fits"


@dataclass(frozen=True)
class Planner:
    """Everything that a plan depends on except the settings, which advice changes."""

    model: PlannedModel
    sample: SampleSize
    split: GpuSplit
    memory: float  # bytes of each GPU

    def plan(self, settings: Settings) -> MemoryPlan:
        """Return the use of the GPUs with these settings, the problems, and what to change."""
        bare = self.estimate(settings)
        if bare.verdict != "does not fit":
            return bare
        advice = list(itertools.islice(self._advice(settings), SUGGESTIONS))
        fix = "; or ".join(advice) if advice else "use GPUs with more memory, or a smaller model"
        errors = [replace(finding, fix=fix) for finding in bare.findings if finding.severity == "error"]
        others = [finding for finding in bare.findings if finding.severity != "error"]
        return replace(bare, findings=(*errors, *others))

    def estimate(self, settings: Settings) -> MemoryPlan:
        """Return the use of the GPUs with these settings, and the problems without advice."""
        rollouts, learner = choose_rollouts(settings), self.learner(settings)
        engine = self._engine(settings) if rollouts in ("colocate", "server") else None
        share = settings.rollout_matching.vllm.gpu_memory_utilization * self.memory
        findings: list[Finding] = []
        uses: list[GpuUse] = []
        if engine is not None:
            findings += _engine_findings(settings, engine, share, self.memory)
        if rollouts == "server" and engine is not None:
            sections = (("engine", _engine_items(engine, share)),)
            uses.append(GpuUse("rollout server", self.split.servers, sections, 0.0, self.memory))
        uses += self._learner_uses(settings, learner, engine if rollouts == "colocate" else None, share)
        findings += [_fit_finding(use) for use in uses if use.verdict == "does not fit"]
        return MemoryPlan(tuple(uses), engine, tuple(findings))

    def learner(self, settings: Settings) -> LearnerMemory:
        """Return the memory of one learner with these settings."""
        setup = LearnerSetup.from_settings(settings, self.model.weights, len(self.split.learners))
        row = row_size(settings, self.sample, self.model.shape)
        memory = learner_memory(self.model.shape, self.model.weights, setup, row)
        if choose_rollouts(settings) != "hf":
            return memory
        moment = generation_moment(self.model.shape, setup, self._load(settings))
        return replace(memory, moments=(*memory.moments, moment))

    def _load(self, settings: Settings) -> EngineLoad:
        shape = limit_pixels(self.model.shape, settings)
        return EngineLoad.from_settings(settings, self.sample.image_tokens(shape))

    def _engine(self, settings: Settings) -> EngineMemory:
        return engine_memory(limit_pixels(self.model.shape, settings), self.model.weights, self._load(settings))

    def _learner_uses(
        self, settings: Settings, learner: LearnerMemory, engine: EngineMemory | None, share: float
    ) -> Iterator[GpuUse]:
        """Yield the use of the learner's GPUs. `engine` is the engine on the same GPUs, if there is one. If it
        sleeps while the learner trains, there are two uses, of which each must fit."""
        context = Item("CUDA context", CONTEXT_BYTES)
        training = (f"learner, at its peak ({learner.peak.name})", (*learner.items, context))
        gpus, reserve = self.split.learners, RESERVE * self.memory
        if engine is None:
            yield GpuUse("learner", gpus, (training,), reserve, self.memory)
            return
        active = ("engine", _engine_items(engine, share))
        if not settings.rollout_matching.vllm.sleep:
            yield GpuUse("learner and engine", gpus, (training, active), reserve, self.memory)
            return
        asleep = ("engine, asleep", (context,))
        yield GpuUse("learner, while the engine sleeps", gpus, (training, asleep), reserve, self.memory)
        waiting = ("learner, while the engine generates", (*_waiting_items(settings, learner), context))
        yield GpuUse("engine, while the learner waits", gpus, (waiting, active), reserve, self.memory)

    def _advice(self, settings: Settings) -> Iterator[str]:
        """Yield changes with which the run fits, each with the memory that it needs then. For every choice of
        settings, only the first sufficient values are named, and settings beyond a sufficient choice are not."""
        changes = list(self._changes(settings))
        sufficient: list[frozenset[str]] = []
        for count in range(1, MOST_CHANGES + 1):
            for chosen in itertools.combinations(changes, count):
                paths = frozenset(change.path for change in chosen)
                if len(paths) < count or any(known <= paths for known in sufficient):
                    continue
                changed = settings
                for change in chosen:
                    changed = change_setting(changed, change.path, change.value)
                outcome = self.estimate(changed)
                if outcome.verdict == "fits":
                    sufficient.append(paths)
                    need = max(use.total for use in outcome.uses)
                    yield f"set {' and '.join(change.text for change in chosen)} ({need / GIB:.1f} GiB)"

    def _changes(self, settings: Settings) -> Iterator["Change"]:
        """Yield the changes that may help, the ones with the least effect on training first."""
        training, vllm, rollouts = settings.training, settings.rollout_matching.vllm, choose_rollouts(settings)
        if not training.gradient_checkpointing:
            yield Change("training.gradient_checkpointing", True, "training.gradient_checkpointing: true")
        if rollouts in ("colocate", "server"):
            for share in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15):
                if share != vllm.gpu_memory_utilization:
                    yield Change(UTILIZATION, share, f"vllm.gpu_memory_utilization: {share:g}")
            if rollouts == "colocate" and not vllm.sleep:
                yield Change("rollout_matching.vllm.sleep", True, "vllm.sleep: true")
            yield Change("model.max_pixels", 2_097_152, "model.max_pixels: 2097152")
        if len(self.split.learners) > 1 and not training.fsdp:
            yield Change("training.fsdp", True, "training.fsdp: true")
        if settings.model.adapter is None:
            adapter = Adapter(rank=32, alpha=64)
            yield Change("model.adapter", adapter, "model.adapter: {type: lora, rank: 32, alpha: 64}")
        if not training.packing and training.per_device_train_batch_size > 1:
            path = "training.per_device_train_batch_size"
            yield Change(path, 1, "training.per_device_train_batch_size: 1")
        for part in (2, 4):
            length = (settings.global_max_length or 0) // part
            if length >= SHORTEST:
                yield Change("global_max_length", length, f"global_max_length: {length}")
        yield from self._parallel_changes(settings, rollouts)
        if settings.rollout_matching.decode_batch_size > FEW:
            yield Change("rollout_matching.decode_batch_size", FEW, f"decode_batch_size: {FEW}")
        if rollouts == "colocate":
            name = settings.backend_setting
            yield Change(name, "hf", f"{name.removeprefix('rollout_matching.')}: hf")

    def _parallel_changes(self, settings: Settings, rollouts: Rollouts) -> Iterator["Change"]:
        """Yield larger numbers of GPUs per engine."""
        if rollouts not in ("colocate", "server"):
            return
        devices = len(self.split.servers) if rollouts == "server" else len(self.split.learners)
        now = settings.rollout_matching.vllm.tensor_parallel_size or 1
        for size in (2, 4, 8):
            if now < size <= self.model.shape.text.kv_heads and devices % size == 0:
                yield Change(TENSOR_PARALLEL, size, f"vllm.tensor_parallel_size: {size}")


@dataclass(frozen=True)
class Change:
    """A setting, a new value for it, and the words for both in a config."""

    path: str
    value: Any
    text: str


def change_setting(settings: Settings, path: str, value: Any) -> Settings:
    """Return settings with another value at a path such as `training.packing`. Rules are not checked. A new
    `global_max_length` also limits the engine's sequences."""
    changed: Settings = _replace_at(settings, path, value)
    if path == "global_max_length" and (settings.rollout_matching.vllm.max_model_len or 0) > value:
        return change_setting(changed, "rollout_matching.vllm.max_model_len", value)
    return changed


def _replace_at(section: Any, path: str, value: Any) -> Any:
    name, _, rest = path.partition(".")
    return section.model_copy(update={name: _replace_at(getattr(section, name), rest, value) if rest else value})


def choose_rollouts(settings: Settings) -> Rollouts:
    """Return how the settings make rollouts. Backends of other packages count as none."""
    rollout = settings.rollout_matching
    if settings.backend == "vllm":
        return rollout.vllm.mode
    if not settings.uses_rollouts or rollout.noise.enabled:
        return "none"
    return "hf" if settings.backend == "hf" else "none"


def with_rollouts(settings: Settings, rollouts: Rollouts) -> Settings:
    """Return settings that make rollouts in another way. The number of GPUs per engine is chosen anew."""
    if rollouts == choose_rollouts(settings):
        return settings
    if not settings.uses_rollouts:
        raise UserError(f"{settings.custom.trainer_variant} makes no rollouts", "leave --rollouts out")
    backend = "hf" if rollouts == "hf" else "vllm"
    settings = change_setting(settings, "rollout_matching.rollout_backend", backend)
    settings = change_setting(settings, TENSOR_PARALLEL, None)
    return settings if rollouts == "hf" else change_setting(settings, MODE, rollouts)


def with_engine_size(settings: Settings, learners: int) -> Settings:
    """Return settings with a number of GPUs per engine. If they have none, it follows from the learners."""
    if settings.rollout_matching.vllm.tensor_parallel_size is not None:
        return settings
    size = default_tensor_parallel_size(learners) if choose_rollouts(settings) == "colocate" else 1
    return change_setting(settings, TENSOR_PARALLEL, size)


def split_gpus(settings: Settings, gpus: int, server_gpus: int | None = None) -> GpuSplit:
    """Return which GPUs have servers and which have learners. The servers come first, as in `coordexp launch`.

    Without `server_gpus`, every server of the config gets as many GPUs as it needs. Raise UserError if no GPU is
    left for a learner."""
    if choose_rollouts(settings) != "server":
        if server_gpus is not None:
            raise UserError(f"--server-gpus {server_gpus}: there are no servers", "add --rollouts server")
        return GpuSplit((), tuple(range(gpus)))
    vllm = settings.rollout_matching.vllm
    count = server_gpus
    if count is None:
        count = max(1, len(vllm.server.servers)) * vllm.devices_per_server
    if not 0 < count < gpus:
        raise UserError(
            f"{count} of {gpus} GPUs are for rollout servers, so no GPU is left for a learner",
            "give more GPUs (--gpus), or say how many the servers get (--server-gpus)",
        )
    return GpuSplit(tuple(range(count)), tuple(range(count, gpus)))


def row_size(settings: Settings, sample: SampleSize, shape: ModelShape) -> RowSize:
    """Return the size of the largest row: a full one with packing, else the samples of one device."""
    longest = settings.global_max_length or 0
    image = sample.image_tokens(limit_pixels(shape, settings))
    length = min(longest, image + PROMPT_TOKENS + sample.answer_tokens)
    training = settings.training
    samples = max(1, longest // length) if training.packing else training.per_device_train_batch_size
    tokens = longest if training.packing else min(longest, samples * length)
    image_tokens = min(tokens, samples * image)
    return RowSize(tokens, image_tokens, min(tokens - image_tokens, samples * sample.answer_tokens))


def limit_pixels(shape: ModelShape, settings: Settings) -> ModelShape:
    """Return the shape with the largest image of the settings, if they have such a limit."""
    pixels = settings.model.max_pixels
    return shape if pixels is None else replace(shape, largest_image=min(shape.largest_image, pixels))


def _waiting_items(settings: Settings, learner: LearnerMemory) -> tuple[Item, ...]:
    """Return what the learner holds while it waits for rollouts: no gradients, and nothing that is offloaded."""
    offload = settings.rollout_matching.offload
    items = learner.kept
    if offload.enabled and offload.offload_optimizer:
        items = tuple(item for item in items if item.name != OPTIMIZER_STATES)
    if offload.enabled and offload.offload_model:
        items = tuple(item for item in items if not item.name.startswith(("weights", "adapter")))
    return items


def _engine_items(engine: EngineMemory, share: float) -> tuple[Item, ...]:
    """Return the parts of the engine's memory. The KV cache gets what is left of its share."""
    return (*engine.items, Item("KV cache", max(engine.longest_bytes, share - engine.fixed_bytes)))


def _engine_findings(settings: Settings, engine: EngineMemory, share: float, memory: float) -> Iterator[Finding]:
    given = settings.rollout_matching.vllm.gpu_memory_utilization
    if engine.least_bytes > share:
        yield Finding(
            "error",
            UTILIZATION,
            f"the engine needs at least {engine.least_bytes / GIB:.1f} GiB, and a share of {given:g} of a GPU is "
            f"{share / GIB:.1f} GiB",
        )
    elif engine.requests_bytes > share - engine.fixed_bytes:
        fits = (share - engine.fixed_bytes) / engine.requests_bytes
        yield Finding(
            "warning",
            UTILIZATION,
            f"the KV cache has room for {fits:.0%} of the configured requests at their greatest length; the rest "
            "wait",
            "raise gpu_memory_utilization, or lower decode_batch_size, max_new_tokens or max_model_len",
        )


def _fit_finding(use: GpuUse) -> Finding:
    need, memory = use.total / GIB, use.memory / GIB
    where = f"{use.role} on {describe_gpus(use.gpus)}"
    return Finding("error", "memory", f"{where}: {need:.1f} GiB are needed, and a GPU has {memory:.1f} GiB")


def describe_gpus(gpus: Sequence[int]) -> str:
    """Return consecutive GPU numbers as words, such as `GPU 3` or `GPUs 0 to 2`."""
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]} to {gpus[-1]}"
