"""Fills in values that follow from other settings, and lists settings that have no effect.

Values are derived once, when a config is loaded. Code that reads settings afterwards finds all of them filled in.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

from coordexp.config import rules
from coordexp.config.capacity import default_tensor_parallel_size
from coordexp.config.rules import World, uses_vllm
from coordexp.config.section import SettingsSection
from coordexp.config.settings import PACKING_KEYS, Settings, Training

S = TypeVar("S", bound=SettingsSection)

TRACKIO = ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "hub_private_repo")
# Keys of `rollout_matching` that evaluation reads in every trainer variant.
READ_BY_EVALUATION = {"decode_batch_size", "max_new_tokens", "repeat_terminate"}


def derive(settings: Settings, world: World) -> tuple[Settings, dict[str, str]]:
    """Return the settings with all derived values filled in, and the reason for each derived value by its path."""
    reasons: dict[str, str] = {}
    for path, value, reason in _derive_values(settings, world):
        settings = _replace(settings, path.split("."), value)
        reasons[path] = reason
    return settings, reasons


def _derive_values(s: Settings, world: World) -> Iterator[tuple[str, Any, str]]:
    """Yield the path, the value and the reason of each value that the file leaves open."""
    vllm, length = s.rollout_matching.vllm, rules.max_length(s)
    if s.global_max_length is None:
        yield "global_max_length", length, "from template.max_length"
    if s.template.max_length is None:
        yield "template.max_length", length, "from global_max_length"
    if s.rollout_matching.decode_mode is None:
        yield rules.DECODE_MODE, s.rollout_matching.effective_decode_mode, "from the temperature"
    if vllm.tensor_parallel_size is None and vllm.mode == "colocate" and world.learners is not None:
        size = default_tensor_parallel_size(world.learners)
        yield rules.TENSOR_PARALLEL, size, f"common divisor of 4 and the learner world size {world.learners}"
    if vllm.tensor_parallel_size is None and vllm.mode == "server":
        yield rules.TENSOR_PARALLEL, 1, "one device per server"
    if vllm.sync.mode == "auto":
        yield rules.SYNC, rules.sync_mode(s), f"auto, and enable_lora is {str(vllm.enable_lora).lower()}"
    if vllm.max_model_len is None:
        yield "rollout_matching.vllm.max_model_len", length, "from global_max_length"
    if vllm.max_lora_rank is None and vllm.enable_lora and s.model.adapter is not None:
        yield "rollout_matching.vllm.max_lora_rank", s.model.adapter.rank, "from model.adapter.rank"


def _replace(section: S, path: list[str], value: Any) -> S:
    key, *rest = path
    return section.model_copy(update={key: _replace(getattr(section, key), rest, value) if rest else value})


def idle_settings(s: Settings) -> Iterator[str]:
    """Yield a note for every setting that is written but has no effect.

    Such a setting is not an error, so that a backend or a channel can be switched off by changing a single value.
    """
    yield from _idle_modules(s)
    yield from _idle_sections(s)
    yield from _idle_arguments(s.training)


def _idle_modules(s: Settings) -> Iterator[str]:
    assert s.pipeline is not None
    for part, modules in (("objective", s.pipeline.objective), ("diagnostics", s.pipeline.diagnostics)):
        for index, module in enumerate(modules):
            if reason := rules.idle_reason(module, s):
                yield f"{s.pipeline_path}.{part}[{index}] ({module.name}) is {reason}"


def _idle_sections(s: Settings) -> Iterator[str]:
    rollout, variant = s.rollout_matching, s.custom.trainer_variant
    if "B" not in s.channels and s.stage2.model_fields_set & {"dump_every", "dump_samples"}:
        yield "stage2.dump_every and dump_samples are not used: there are no rollouts to dump"
    elif s.stage2.dump_every is None and "dump_samples" in _non_default_keys(s.stage2):
        yield "stage2.dump_samples is not used: stage2.dump_every is null"
    if not s.uses_rollouts:
        hugging_face = {"rollout_backend"} if rollout.rollout_backend == "hf" else set()
        for name in sorted(_non_default_keys(rollout) - READ_BY_EVALUATION - hugging_face):
            yield f"rollout_matching.{name} is not used by {variant}"
        return
    if s.stage1.pipeline is not None:
        yield f"stage1.pipeline is not used by {variant}"
    if rollout.rollout_backend == "hf" and "vllm" in rollout.model_fields_set:
        yield "rollout_matching.vllm is not used with rollout_backend: hf"
    elif rollout.vllm.mode == "colocate" and "server" in _non_default_keys(rollout.vllm):
        yield "rollout_matching.vllm.server is not used with vllm.mode: colocate"
    if "max_lora_rank" in _non_default_keys(rollout.vllm) and not rollout.vllm.enable_lora:
        yield "rollout_matching.vllm.max_lora_rank is not used: enable_lora is false"
    if rollout.vllm.enable_lora and uses_vllm(s, "colocate") and rules.sync_mode(s) == "full":
        yield (
            "rollout_matching.vllm.enable_lora is not used: a colocated engine loads adapters only with sync.mode "
            "adapter or auto"
        )
    if rollout.offload.enabled and not uses_vllm(s, "colocate"):
        yield "rollout_matching.offload is not used: only colocated vLLM shares memory with the learner"
    elif rollout.offload.enabled and not (rollout.offload.offload_model or rollout.offload.offload_optimizer):
        yield "rollout_matching.offload moves nothing: set offload_model, offload_optimizer or both"
    if rollout.rollouts_per_sample == 1 and _non_default_keys(rollout.choice):
        yield "rollout_matching.choice is not used: rollouts_per_sample is 1"
    elif rollout.choice.rule == "best" and "votes" in _non_default_keys(rollout.choice):
        yield "rollout_matching.choice.votes is not used: the rule is best"
    if (
        "duplicate_iou" in _non_default_keys(rollout.correction)
        and rollout.correction.duplicates == "keep"
        and rollout.rollouts_per_sample == 1
    ):
        yield "rollout_matching.correction.duplicate_iou is not used: duplicates are kept"
    sections = (
        ("offload", rollout.offload),
        ("repeat_terminate", rollout.repeat_terminate),
        ("noise", rollout.noise),
    )
    for name, section in sections:
        if section.model_fields_set - {"enabled"} and not section.enabled:
            yield f"rollout_matching.{name} is not used: its enabled is false"
    for name, neutral in (("top_p", 1.0), ("top_k", -1)):
        if rollout.effective_decode_mode != "sampling" and getattr(rollout.decoding, name) != neutral:
            yield f"rollout_matching.decoding.{name} is not used by {rollout.effective_decode_mode} decoding"


def _non_default_keys(section: SettingsSection) -> set[str]:
    """Return the keys whose values are not the defaults."""
    return {
        name
        for name, field in type(section).model_fields.items()
        if getattr(section, name) != field.get_default(call_default_factory=True)
    }


def _idle_arguments(training: Training) -> Iterator[str]:
    """Yield a note for every training argument that another argument makes ineffective."""
    reports = training.report_to or ()
    reports = (reports,) if isinstance(reports, str) else reports
    trackio = bool({"trackio", "all"} & set(reports))
    evaluates = training.eval_strategy != "no"
    galore = training.optim.startswith(("galore", "apollo"))
    idle = {
        "per_device_eval_batch_size": "rollout_matching.decode_batch_size sets how evaluation generates answers",
        "num_train_epochs": training.max_steps > 0 and "training.max_steps is set",
        "eval_steps": not evaluates and "training.eval_strategy is no",
        "eval_delay": not evaluates and "training.eval_strategy is no",
        "metric_for_best_model": not evaluates and "training.eval_strategy is no",
        "greater_is_better": training.metric_for_best_model is None
        and "training.metric_for_best_model is not set",
        "save_steps": training.save_strategy != "steps" and f"training.save_strategy is {training.save_strategy}",
        "save_total_limit": training.save_strategy == "no" and "training.save_strategy is no",
        "logging_steps": training.logging_strategy != "steps"
        and f"training.logging_strategy is {training.logging_strategy}",
        **dict.fromkeys(PACKING_KEYS[1:], not training.packing and "training.packing is false"),
        "gradient_checkpointing_kwargs": not training.gradient_checkpointing
        and "training.gradient_checkpointing is false",
        "optim_target_modules": not galore and f"training.optim is {training.optim}",
        "fsdp_config": not training.fsdp and "training.fsdp is not set",
        "ddp_timeout": training.use_cpu and "with training.use_cpu, transformers sets no timeout",
        "run_name": set(reports) <= {"none", "tensorboard"} and "no integration in training.report_to shows it",
        **dict.fromkeys(TRACKIO, not trackio and "training.report_to does not name trackio"),
    }
    for name, reason in idle.items():
        if reason and name in _non_default_keys(training):
            yield f"training.{name} is not used: {reason}"
