"""Estimate how much memory the parts of a plan need at least, from the headers of the weight files alone.

These are lower bounds: activations, buffers of collectives and CUDA's own memory come on top. So a need above the
available memory is an error, and one close to it is a warning.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp.config import Settings, Violation
from coordexp.config.paths import parse_path
from coordexp.launch.plan import Plan

GB = 1e9
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CLOSE = 0.7  # a learner that needs more than this share has little left for activations
ADAM_STATES = 2


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of memory of a GPU, or of the machine."""

    total: int
    free: int


@dataclass(frozen=True)
class MemoryNeed:
    """The bytes that a part needs at least on each of its devices, and what for."""

    part: str
    bytes: float
    purpose: str

    def __str__(self) -> str:
        return f"{self.part} needs at least {format_bytes(self.bytes)} ({self.purpose})"


@dataclass(frozen=True)
class MemoryWarning:
    """A plan may run out of memory."""

    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}"


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights, by name. Only the headers of the safetensors files are read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def estimate_needs(plan: Plan, settings: Settings, folder: Path) -> list[MemoryNeed]:
    """Return the need of every part that is started here; nothing for a folder without safetensors files."""
    shapes = read_shapes(folder)
    if not shapes:
        return []
    weights = sum(map(math.prod, shapes.values())) * BYTES[settings.model.dtype]
    size = settings.rollout_matching.vllm.tensor_parallel_size or 1  # devices that share one copy of the weights
    cache = _sequence_bytes(settings, folder)
    purpose = f"weights {format_bytes(weights / size)}, one longest sequence {format_bytes(cache / size)}"
    servers = [MemoryNeed(server.name, (weights + cache) / size, purpose) for server in plan.local_servers]
    return [*servers, _learner(plan, settings, shapes, weights)]


def gpu_problems(
    plan: Plan, settings: Settings, needs: list[MemoryNeed], devices: dict[int, DeviceMemory]
) -> Iterator[Violation | MemoryWarning]:
    """Yield the problems on GPUs, where every part has devices of its own."""
    share = settings.rollout_matching.vllm.gpu_memory_utilization
    gpus = {part.name: part.gpus for part in (plan.learner, *(s.part for s in plan.local_servers if s.part))}
    for need in needs:
        for gpu in gpus[need.part]:
            if gpu not in devices:
                continue
            device, learner = devices[gpu], need.part == plan.learner.name
            limit = device.free if learner else device.total * share
            if not learner and limit > device.free:
                yield Violation(
                    ("--server-gpus",),
                    f"GPU {gpu} has {format_bytes(device.free)} free of {format_bytes(device.total)}, and "
                    f"{need.part} takes a share of {share:g} ({format_bytes(limit)})",
                    "end the other programs on that GPU, or lower rollout_matching.vllm.gpu_memory_utilization",
                )
            elif need.bytes > limit:
                yield _too_much(need, f"GPU {gpu} has {format_bytes(limit)} for it", learner)
            elif learner and need.bytes > CLOSE * limit:
                problem = f"{need}, and GPU {gpu} has {format_bytes(limit)}: little is left for activations"
                yield MemoryWarning(problem, "lower global_max_length if the learner runs out of memory")


def machine_problems(
    plan: Plan, settings: Settings, needs: list[MemoryNeed], machine: DeviceMemory
) -> Iterator[Violation | MemoryWarning]:
    """Yield the problems on the CPU, where all parts share the memory of the machine."""
    processes = {server.name: server.world_size or 1 for server in plan.local_servers} | {"learner": plan.learners}
    by_part = {need.part: need.bytes * processes[need.part] for need in needs}
    if not by_part:
        return
    if sum(by_part.values()) > machine.free:
        parts = ", ".join(f"{name} {format_bytes(bytes)}" for name, bytes in by_part.items())
        yield Violation(
            parse_path("model.path"),
            f"the parts need at least {format_bytes(sum(by_part.values()))} ({parts}), and the machine "
            f"has {format_bytes(machine.free)} available",
            "start fewer servers or learners, use a smaller model, or end other programs",
        )
        return
    share = settings.rollout_matching.vllm.gpu_memory_utilization
    workers = sum(server.world_size or 1 for server in plan.local_servers)
    reserved = share * machine.total * workers + by_part["learner"]
    if reserved > machine.free:
        yield MemoryWarning(
            f"each of {workers} workers of the servers may take a share of {share:g} of the machine's "
            f"{format_bytes(machine.total)}; with the learners this is {format_bytes(reserved)}, and "
            f"{format_bytes(machine.free)} are available",
            "lower rollout_matching.vllm.gpu_memory_utilization if a server does not start",
        )


def _learner(plan: Plan, settings: Settings, shapes: dict[str, tuple[int, ...]], weights: int) -> MemoryNeed:
    states = ADAM_STATES if settings.training.optim in ("adamw_torch", "adamw_torch_fused") else 0
    adapter = settings.model.adapter
    parts = plan.learners if settings.training.fsdp else 1
    if adapter is None:
        trained = weights * (1 + states)
        label = f"gradients and optimizer {format_bytes(trained / parts)}"
    elif adapter.targets == "all-linear":  # peft keeps adapters in float32
        linear = [s for name, s in shapes.items() if len(s) == 2 and "embed" not in name and "lm_head" not in name]
        trained = adapter.rank * sum(map(sum, linear)) * 4 * (2 + states)
        label = f"adapter of rank {adapter.rank}, gradients and optimizer {format_bytes(trained / parts)}"
    else:
        trained, label = 0, "without its adapter"
    purpose = f"weights {format_bytes(weights / parts)}, {label}"
    return MemoryNeed(plan.learner.name, (weights + trained) / parts, purpose)


def _sequence_bytes(settings: Settings, folder: Path) -> float:
    """Return the bytes of the keys and values of one sequence of the greatest length; 0 without a config.json."""
    file = folder / "config.json"
    if not file.is_file():
        return 0.0
    config: dict[str, Any] = json.loads(file.read_text())
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads") or 1
    width = text.get("head_dim") or text.get("hidden_size", 0) // heads
    per_token = 2 * text.get("num_hidden_layers", 0) * text.get("num_key_value_heads", heads) * width
    length = settings.rollout_matching.vllm.max_model_len or 0
    return float(per_token * length * BYTES[settings.model.dtype])


def _too_much(need: MemoryNeed, available: str, learner: bool) -> Violation:
    fix = (
        "train an adapter (model.adapter), shard it (training.fsdp), or use a larger GPU"
        if learner
        else "raise vllm.gpu_memory_utilization, give each server more GPUs (vllm.tensor_parallel_size), or lower "
        "vllm.max_model_len"
    )
    return Violation(("--train-gpus" if learner else "--server-gpus",), f"{need}, and {available}", fix)


def format_bytes(bytes: float) -> str:
    """Return a number of bytes as words, such as `1.5 GB`."""
    return f"{bytes / GB:.1f} GB" if bytes >= GB else f"{bytes / 1e6:.1f} MB"
