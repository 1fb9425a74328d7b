"""Values that a file may leave open and that follow from others, and settings that will have no effect.

Deriving happens once, at load: whoever reads settings afterwards finds every value filled in.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

from coordexp.config import rules
from coordexp.config.capacity import default_tensor_parallel_size
from coordexp.config.rules import World, uses_vllm
from coordexp.config.section import Section
from coordexp.config.settings import Settings

S = TypeVar("S", bound=Section)


def derive(settings: Settings, world: World) -> tuple[Settings, dict[str, str]]:
    """The settings with nothing left open, and for each value filled in the reason."""
    reasons: dict[str, str] = {}
    for path, value, reason in _derived(settings, world):
        settings = _replace(settings, path.split("."), value)
        reasons[path] = reason
    return settings, reasons


def _derived(s: Settings, world: World) -> Iterator[tuple[str, Any, str]]:
    vllm, length = s.rollout_matching.vllm, rules.max_length(s)
    if s.global_max_length is None:
        yield "global_max_length", length, "from template.max_length"
    if s.template.max_length is None:
        yield "template.max_length", length, "from global_max_length"
    if s.rollout_matching.decode_mode is None:
        yield rules.DECODE_MODE, s.rollout_matching.mode_of_decoding, "from the temperature"
    if vllm.tensor_parallel_size is None and vllm.mode == "colocate" and world.learners is not None:
        size = default_tensor_parallel_size(world.learners)
        yield rules.TENSOR_PARALLEL, size, f"common divisor of 4 and the learner world size {world.learners}"
    if vllm.tensor_parallel_size is None and vllm.mode == "server":
        yield rules.TENSOR_PARALLEL, 1, "one device a server"
    if vllm.sync.mode == "auto":
        yield rules.SYNC, rules.sync_mode(s), f"auto, and enable_lora is {str(vllm.enable_lora).lower()}"
    if vllm.max_model_len is None:
        yield "rollout_matching.vllm.max_model_len", length, "from global_max_length"
    if vllm.max_lora_rank is None and vllm.enable_lora and s.model.adapter is not None:
        yield "rollout_matching.vllm.max_lora_rank", s.model.adapter.rank, "from model.adapter.rank"


def _replace(section: S, path: list[str], value: Any) -> S:
    key, *rest = path
    return section.model_copy(update={key: _replace(getattr(section, key), rest, value) if rest else value})


def notes(s: Settings) -> Iterator[str]:
    """What is written and will do nothing: said once, never an error (R17, D6)."""
    yield from _idle_modules(s)
    yield from _idle_sections(s)


def _idle_modules(s: Settings) -> Iterator[str]:
    assert s.pipeline is not None
    for part, modules in (("objective", s.pipeline.objective), ("diagnostics", s.pipeline.diagnostics)):
        for index, module in enumerate(modules):
            if reason := rules.idle(module, s):
                yield f"{s.pipeline_path}.{part}[{index}] ({module.name}) is {reason}"


def _idle_sections(s: Settings) -> Iterator[str]:
    rollout, variant = s.rollout_matching, s.custom.trainer_variant
    if "B" not in s.channels and s.stage2.model_fields_set & {"dump_every", "dump_samples"}:
        yield "stage2.dump_every and dump_samples are not used: there are no rollouts to dump"
    if s.uses_rollouts and s.stage1.pipeline is not None:
        yield f"stage1.pipeline is not used by {variant}"
    if not s.uses_rollouts and rollout.pipeline is not None:
        yield f"rollout_matching.pipeline is not used by {variant}"
    if rollout.rollout_backend == "hf" and "vllm" in rollout.model_fields_set:
        yield "rollout_matching.vllm is not used with rollout_backend: hf"
    elif rollout.vllm.mode == "colocate" and rollout.vllm.server.servers:
        yield "rollout_matching.vllm.server is not used with vllm.mode: colocate"
    if rollout.vllm.enable_lora and uses_vllm(s, "colocate"):
        yield "rollout_matching.vllm.enable_lora is not used with vllm.mode: colocate, which sends merged weights"
    if rollout.offload.enabled and not uses_vllm(s, "colocate"):
        yield "rollout_matching.offload is not used: only colocated vLLM shares memory with the learner"
    elif rollout.offload.enabled and not (rollout.offload.offload_model or rollout.offload.offload_optimizer):
        yield "rollout_matching.offload moves nothing: set offload_model, offload_optimizer or both"
    for name, section in (("offload", rollout.offload), ("repeat_terminate", rollout.repeat_terminate)):
        if section.model_fields_set - {"enabled"} and not section.enabled:
            yield f"rollout_matching.{name} is not used: its enabled is false"
    for name, neutral in (("top_p", 1.0), ("top_k", -1)):
        if rollout.mode_of_decoding != "sampling" and getattr(rollout.decoding, name) != neutral:
            yield f"rollout_matching.decoding.{name} is not used by {rollout.mode_of_decoding} decoding"
    if s.uses_rollouts and "per_device_eval_batch_size" in s.training.model_fields_set:
        yield (
            "training.per_device_eval_batch_size does not set how rollouts are evaluated; "
            "rollout_matching.decode_batch_size does"
        )
