"""How much memory the parts of a plan need at least, from the headers of the weight files alone.

Lower bounds: activations, buffers of collectives and what CUDA keeps for itself come on top. So a need beyond what
is there is an error, and one close to it a warning.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp.config import Settings, Violation
from coordexp.config.paths import keys_of
from coordexp.launch.plan import Plan

GB = 1e9
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CLOSE = 0.7  # a learner whose bound is above this share has little left for activations
ADAM_STATES = 2


@dataclass(frozen=True)
class Device:
    total: int
    free: int


@dataclass(frozen=True)
class Need:
    part: str
    bytes: float  # at least, on each of its devices
    what: str

    def __str__(self) -> str:
        return f"{self.part} needs at least {amount(self.bytes)} ({self.what})"


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of all weights, without reading them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        shapes |= {name: tuple(about["shape"]) for name, about in header.items() if name != "__metadata__"}
    return shapes


def needs(plan: Plan, settings: Settings, folder: Path) -> list[Need]:
    """One for each part that is started here; none for a folder without safetensors files."""
    shapes = shapes_of(folder)
    if not shapes:
        return []
    weights = sum(map(math.prod, shapes.values())) * BYTES[settings.model.dtype]
    found = []
    size = settings.rollout_matching.vllm.tensor_parallel_size or 1  # devices that share one copy of the weights
    for server in plan.started:
        cache = _sequence_bytes(settings, folder)
        what = f"weights {amount(weights / size)}, one longest sequence {amount(cache / size)}"
        found.append(Need(server.name, (weights + cache) / size, what))
    return [*found, _learner(plan, settings, shapes, weights)]


def gpu_problems(
    plan: Plan, settings: Settings, needed: list[Need], devices: dict[int, Device]
) -> Iterator[Violation | str]:
    """Warnings are texts."""
    share = settings.rollout_matching.vllm.gpu_memory_utilization
    gpus = {part.name: part.gpus for part in (plan.learner, *(s.part for s in plan.started if s.part))}
    for need in needed:
        for gpu in gpus[need.part]:
            if gpu not in devices:
                continue
            device, learner = devices[gpu], need.part == plan.learner.name
            limit = device.free if learner else device.total * share
            if not learner and limit > device.free:
                yield Violation(
                    ("--server-gpus",),
                    f"GPU {gpu} has {amount(device.free)} free of {amount(device.total)}, and {need.part} takes "
                    f"a share of {share:g} ({amount(limit)})",
                    "end what else runs on it, or lower rollout_matching.vllm.gpu_memory_utilization",
                )
            elif need.bytes > limit:
                yield _too_much(need, f"GPU {gpu} has {amount(limit)} for it", learner)
            elif learner and need.bytes > CLOSE * limit:
                yield f"{need}; GPU {gpu} has {amount(limit)}: little is left for activations"


def machine_problems(
    plan: Plan, settings: Settings, needed: list[Need], machine: Device
) -> Iterator[Violation | str]:
    """On the CPU, where all parts share the memory."""
    devices = {server.name: server.world_size or 1 for server in plan.started} | {"learner": plan.learners}
    each = {need.part: need.bytes * devices[need.part] for need in needed}
    if not each:
        return
    if sum(each.values()) > machine.free:
        parts = ", ".join(f"{name} {amount(bytes)}" for name, bytes in each.items())
        yield Violation(
            keys_of("model.path"),
            f"the parts need at least {amount(sum(each.values()))} ({parts}), and the machine "
            f"has {amount(machine.free)} available",
            "start fewer servers or learners, use a smaller model, or end what else runs",
        )
        return
    share = settings.rollout_matching.vllm.gpu_memory_utilization
    workers = sum(server.world_size or 1 for server in plan.started)
    reserved = share * machine.total * workers + each["learner"]
    if reserved > machine.free:
        yield (
            f"each of {workers} workers of the servers may take a share of {share:g} of the machine's "
            f"{amount(machine.total)}, with the learners {amount(reserved)}, and {amount(machine.free)} are "
            "available: lower rollout_matching.vllm.gpu_memory_utilization if a server does not start"
        )


def _learner(plan: Plan, settings: Settings, shapes: dict[str, tuple[int, ...]], weights: int) -> Need:
    states = ADAM_STATES if settings.training.optim in ("adamw_torch", "adamw_torch_fused") else 0
    adapter = settings.model.adapter
    if adapter is None:
        trained, label = weights * (1 + states), "gradients and optimizer"
    else:  # peft keeps adapters in float32
        linear = [s for name, s in shapes.items() if len(s) == 2 and "embed" not in name and "lm_head" not in name]
        trained = adapter.rank * sum(map(sum, linear)) * 4 * (2 + states)
        label = f"adapter of rank {adapter.rank}, gradients and optimizer"
        if adapter.targets != "all-linear":
            trained, label = 0, "and its adapter"
    parts = plan.learners if settings.training.fsdp else 1
    what = f"weights {amount(weights / parts)}, {label} {amount(trained / parts)}"
    return Need(plan.learner.name, (weights + trained) / parts, what)


def _sequence_bytes(settings: Settings, folder: Path) -> float:
    """Keys and values of one sequence of the greatest length. 0 when the model's config does not say."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return 0.0
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads") or 1
    width = text.get("head_dim") or text.get("hidden_size", 0) // heads
    per_token = 2 * text.get("num_hidden_layers", 0) * text.get("num_key_value_heads", heads) * width
    length = settings.rollout_matching.vllm.max_model_len or 0
    return float(per_token * length * BYTES[settings.model.dtype])


def _too_much(need: Need, there: str, learner: bool) -> Violation:
    fix = (
        "train an adapter (model.adapter), shard it (training.fsdp), or use a larger GPU"
        if learner
        else "raise vllm.gpu_memory_utilization, give each server more GPUs (vllm.tensor_parallel_size), or lower "
        "vllm.max_model_len"
    )
    return Violation(("--train-gpus" if learner else "--server-gpus",), f"{need}, and {there}", fix)


def amount(bytes: float) -> str:
    return f"{bytes / GB:.1f} GB" if bytes >= GB else f"{bytes / 1e6:.1f} MB"
