"""Loads settings: read the YAML, take out legacy and refused keys, check values, check rules, derive values.

All violations are collected before any is reported. To go on after a wrong value, it is replaced by a valid one,
and conflicts that involve a replaced value are dropped. So each mistake gives one message, without follow-up
errors.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from coordexp.config import rules, schema
from coordexp.config.legacy import RejectedKey, take_out_legacy
from coordexp.config.rollout import default_tensor_parallel_size
from coordexp.config.rules import World, find_conflicts, uses_vllm
from coordexp.config.schema import closest_module, closest_option, explain_error
from coordexp.config.sections import SettingsSection
from coordexp.config.settings import PACKING_KEYS, Settings, Training
from coordexp.config.yaml_tree import (
    COMMAND_LINE,
    Document,
    Key,
    KeyPath,
    Tree,
    Violation,
    copy_tree,
    fill,
    format_path,
    parse_path,
    read_document,
    value_at,
)
from coordexp.errors import ConfigError, Finding

S = TypeVar("S", bound=SettingsSection)


TRACKIO = ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "hub_private_repo")
# Keys of `rollout_matching` that evaluation reads in every trainer variant.
READ_BY_EVALUATION = {"decode_batch_size", "max_new_tokens", "repeat_terminate"}
# How similar a wrong word must be to an allowed one to be replaced by it in further checks.
CERTAIN_SIMILARITY = 0.85
MAX_LISTED_KEYS = 25  # A message does not list the keys of a larger section.


@dataclass(frozen=True)
class Loaded:
    """Validated settings. `origins` maps each value to where it came from; `notes` name what has no effect."""

    settings: Settings
    origins: dict[str, str]
    notes: tuple[Finding, ...]
    files: tuple[str, ...]

    @property
    def overrides(self) -> dict[str, str]:
        """The origins of the values that were given on the command line, by their paths."""
        return {path: origin for path, origin in self.origins.items() if origin.startswith(COMMAND_LINE)}


def load_settings(path: Path | str, world: World | None = None, overrides: Sequence[str] = ()) -> Loaded:
    """Return the settings of a YAML file and of the files it extends. Overrides are texts such as
    `training.max_steps=6`. Raise ConfigError with all violations."""
    return parse_settings(read_document(Path(path), overrides), world, file=str(path))


def parse_settings(document: Document | Tree, world: World | None = None, file: str = "") -> Loaded:
    """Return the settings of a tree in memory. Raise ConfigError with all violations."""
    if not isinstance(document, Document):
        document = Document(tree=document)
    world = world or World()
    settings, violations = _validate(copy_tree(document.tree), world)
    violations = [*document.violations, *violations]
    if violations:
        raise ConfigError(_findings_in_file_order(violations, document), file)
    notes = (*_lost_modules(settings, document), *idle_settings(settings))
    settings, reasons = derive(settings, world)
    origins = {format_path(path): str(origin) for path, origin in document.origins.items()}
    origins |= {path: f"derived: {reason}" for path, reason in reasons.items()}
    return Loaded(settings, origins, notes, tuple(document.files))


def _lost_modules(s: Settings, document: Document) -> Iterator[Finding]:
    """Yield a note for each file whose modules of the objective a list of another file, or an option, replaces."""
    assert s.pipeline is not None
    path, kept = f"{s.pipeline_path}.objective", {module.name for module in s.pipeline.objective}
    for file, tree in document.parts.items():
        modules = value_at(tree, parse_path(path))
        names = [value_at(module, ("name",)) for module in modules] if isinstance(modules, list) else []
        if lost := [str(name) for name in names if name not in kept]:
            problem = f"replaces the list of {file}: {', '.join(lost)} {'is' if len(lost) == 1 else 'are'} gone"
            yield Finding("note", path, problem, "to keep a module, repeat its entry: lists are not merged")


def _findings_in_file_order(violations: list[Violation], document: Document) -> list[Finding]:
    """Return the findings with their origins, sorted by file and line. Those without an origin come last."""

    def position(violation: Violation) -> tuple[int, int]:
        origin = violation.origin or document.origin_of(violation.path)
        if origin is None or origin.file not in document.files:
            return len(document.files), 0
        return document.files.index(origin.file), origin.line or 0

    ordered = sorted(violations, key=position)
    return [replace(v, origin=v.origin or document.origin_of(v.path)).to_finding() for v in ordered]


def _validate(tree: Tree, world: World) -> tuple[Settings, list[Violation]]:
    rejected = [*take_out_legacy(tree), *_take_out_unknown(tree)]
    settings, violations, replaced = _check_values(tree)
    for conflict in find_conflicts(settings, world):
        involved = [parse_path(path) for path in (conflict.path, *conflict.others)]
        if not any(_overlap(left, right) for left in replaced for right in involved):
            violations.append(Violation(parse_path(conflict.path), conflict.problem, conflict.fix))
    moves = [move for key in rejected for move in key.moves]
    return settings, [key.violation for key in rejected] + [_at_written_path(v, moves) for v in violations]


def _overlap(left: KeyPath, right: KeyPath) -> bool:
    """Return whether the paths are equal or one of them contains the other."""
    return all(key == other for key, other in zip(left, right, strict=False))


def _at_written_path(violation: Violation, moves: list[tuple[KeyPath, KeyPath]]) -> Violation:
    """Return the violation at the path that the file has, if its value was moved for further checks."""
    path = violation.path
    for old, new in reversed(moves):
        if path[: len(new)] == new:
            path = (*old, *path[len(new) :])
    return replace(violation, path=path)


def _take_out_unknown(tree: Tree) -> Iterator[RejectedKey]:
    """Remove keys that the schema does not have. The value of a misspelt key moves to the key that was meant."""
    while errors := [e for e in _errors(tree) if e["type"] in ("extra_forbidden", "union_tag_invalid")]:
        unknown = [error for error in errors if error["type"] == "extra_forbidden"]
        if not unknown:
            renamed = [rejected for error in errors if (rejected := _rename_module(error, tree))]
            if not renamed:
                return
            yield from renamed
            continue
        path = _tree_path(unknown[0], tree)
        *parent, key = path
        value = value_at(tree, path[:-1]).pop(key)
        target = _guess_key(tuple(parent), str(key), tree)
        if target is None:
            yield RejectedKey(Violation(path, "unknown key", _list_keys(tuple(parent), tree)))
            continue
        filled = fill(tree, value, target)
        if filled == [target] and not isinstance(value, dict) and target in _wrong_paths(tree):
            value_at(tree, target[:-1]).pop(target[-1])  # The value is wrong there, so only suggest the key.
            filled = []
        moves = tuple(((*path, *new[len(target) :]), new) for new in filled)
        yield RejectedKey(Violation(path, "unknown key", f"did you mean {format_path(target)}?"), moves)


def _rename_module(error: Any, tree: Tree) -> RejectedKey | None:
    """Correct the name of a module that is almost right and return the violation, or None if no name is close."""
    path = _tree_path(error, tree)
    name = closest_module(error, path, tree, CERTAIN_SIMILARITY)
    if name is None:
        return None
    violation = explain_error(error, path, tree)
    value_at(tree, path)["name"] = name
    return RejectedKey(violation)


def _wrong_paths(tree: Tree) -> set[KeyPath]:
    return {_tree_path(error, tree) for error in _errors(tree)}


def _list_keys(parent: KeyPath, tree: Tree) -> str:
    names = schema.names_at(parent, tree)
    if len(names) > MAX_LISTED_KEYS:
        return f"coordexp config reference lists the {len(names)} keys of {format_path(parent)}"
    return f"allowed here: {', '.join(names) or 'nothing'}"


def _guess_key(parent: KeyPath, key: str, tree: Tree) -> KeyPath | None:
    """Return a key of the same section with a similar name, or else the only setting elsewhere with this name."""
    close = difflib.get_close_matches(key, schema.names_at(parent, tree), n=1, cutoff=0.75)
    if close:
        return (*parent, close[0])
    same = [path for path in schema.all_paths() if path[-1] == key]
    return same[0] if len(same) == 1 else None


def _check_values(tree: Tree) -> tuple[Settings, list[Violation], list[KeyPath]]:
    """Return settings, the violations of single values, and the paths at which a value had to be replaced."""
    errors = _errors(tree)
    violations: dict[KeyPath, Violation] = {}
    for error in errors:
        path = _tree_path(error, tree)
        violations.setdefault(path, explain_error(error, path, tree))
    replaced: list[KeyPath] = []
    while errors:
        path = _tree_path(errors[0], tree)
        if option := closest_option(errors[0], path, tree, CERTAIN_SIMILARITY):
            value_at(tree, path[:-1])[path[-1]] = option
        else:
            replaced.append(_replace_with_valid(tree, path))
        errors = _errors(tree)
    return Settings.model_validate(tree), list(violations.values()), replaced


def _errors(tree: Tree) -> list[Any]:
    try:
        Settings.model_validate(tree)
    except ValidationError as invalid:
        return [error for error in invalid.errors(include_url=False) if not _is_follow_up(error)]
    return []


def _is_follow_up(error: Any) -> bool:
    """Return whether pydantic only calls a list too short because its items are wrong."""
    return error["type"] == "too_short" and bool(len(error["input"]) >= error["ctx"]["min_length"])


def _tree_path(error: Any, tree: Any) -> KeyPath:
    """Return the path in the file for pydantic's location, which also names the union member that it tried."""
    path: list[Key] = []
    for key in error["loc"]:
        is_item = isinstance(tree, list) and isinstance(key, int) and key < len(tree)
        if is_item or (isinstance(tree, dict) and key in tree):
            tree = tree[key]
        elif isinstance(tree, dict) and tree.get("name") == key:
            continue  # the kind of module, not a key
        elif error["type"] != "missing":
            break
        path.append(key)
    return tuple(path)


def _replace_with_valid(tree: Tree, path: KeyPath) -> KeyPath:
    """Write a valid value at `path`, or at the nearest path above it that has one. Return the path written."""
    for end in range(len(path), 0, -1):
        here = path[:end]
        node = schema.node_at(here, tree)
        if isinstance(here[-1], int):
            continue
        if node is not None and (value := schema.valid_value(node)) != value_at(tree, here):
            value_at(tree, here[:-1])[here[-1]] = copy_tree(value)
            return here
    raise AssertionError(f"no valid value is known for {format_path(path)}")


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
    if not s.uses_rollouts and s.evaluates and s.stage1.eval_backend == "auto":
        yield "stage1.eval_backend", s.backend, f"auto, and {_explain_backend(s)}"
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


def _explain_backend(s: Settings) -> str:
    if not s.describes_engine:
        return "rollout_matching.vllm describes no engine"
    return f"vLLM is {'' if s.backend == 'vllm' else 'not '}installed"


def _replace(section: S, path: list[str], value: Any) -> S:
    key, *rest = path
    return section.model_copy(update={key: _replace(getattr(section, key), rest, value) if rest else value})


def idle_settings(s: Settings) -> Iterator[Finding]:
    """Yield a note for every setting that is written but has no effect.

    Such a setting is not an error, so that a backend or a channel can be switched off by changing a single value.
    """
    for setting, problem in (*_idle_modules(s), *_idle_sections(s), *_idle_arguments(s.training)):
        yield Finding("note", setting, problem)


def _idle_modules(s: Settings) -> Iterator[tuple[str, str]]:
    assert s.pipeline is not None
    for part, modules in (("objective", s.pipeline.objective), ("diagnostics", s.pipeline.diagnostics)):
        for index, module in enumerate(modules):
            if reason := rules.idle_reason(module, s):
                yield f"{s.pipeline_path}.{part}[{index}]", f"{module.name} is {reason}"


def _idle_sections(s: Settings) -> Iterator[tuple[str, str]]:
    rollout, variant = s.rollout_matching, s.custom.trainer_variant
    if "B" not in s.channels and s.stage2.model_fields_set & {"dump_every", "dump_samples"}:
        yield "stage2.dump_every", "not used, nor is dump_samples: there are no rollouts to dump"
    elif s.stage2.dump_every is None and "dump_samples" in _non_default_keys(s.stage2):
        yield "stage2.dump_samples", "not used: stage2.dump_every is null"
    if not s.uses_rollouts:
        if s.stage1.eval_backend == "vllm" and not s.evaluates:
            yield "stage1.eval_backend", "not used: no evaluation is configured"
        used = READ_BY_EVALUATION | ({"vllm", "offload"} if s.backend == "vllm" else set())
        if s.evaluates and s.stage1.eval_backend == "auto" and s.describes_engine and s.backend == "hf":
            used.add("vllm")
            yield "rollout_matching.vllm", "not used: vLLM is not installed, so transformers answers in evaluation"
        if rollout.rollout_backend == "hf":
            used.add("rollout_backend")
        for name in sorted(_non_default_keys(rollout) - used):
            yield f"rollout_matching.{name}", f"not used by {variant}"
        return
    if s.stage1.eval_backend != "auto":
        yield "stage1.eval_backend", f"not used by {variant}, which evaluates with its rollout_backend"
    if s.stage1.pipeline is not None:
        yield "stage1.pipeline", f"not used by {variant}"
    if rollout.rollout_backend != "vllm" and "vllm" in rollout.model_fields_set:
        yield "rollout_matching.vllm", f"not used with rollout_backend: {rollout.rollout_backend}"
    elif rollout.vllm.mode == "colocate" and "server" in _non_default_keys(rollout.vllm):
        yield "rollout_matching.vllm.server", "not used with vllm.mode: colocate"
    for name in sorted({"senders", "timeout_s"} & _non_default_keys(rollout.vllm.sync)):
        if uses_vllm(s, "colocate"):
            yield f"rollout_matching.vllm.sync.{name}", "not used with vllm.mode: colocate"
    if "max_lora_rank" in _non_default_keys(rollout.vllm) and not rollout.vllm.enable_lora:
        yield "rollout_matching.vllm.max_lora_rank", "not used: enable_lora is false"
    if rollout.vllm.enable_lora and uses_vllm(s, "colocate") and rules.sync_mode(s) == "full":
        yield (
            "rollout_matching.vllm.enable_lora",
            "not used: a colocated engine loads adapters only with sync.mode adapter or auto",
        )
    if rollout.offload.enabled and not uses_vllm(s, "colocate"):
        yield "rollout_matching.offload", "not used: only colocated vLLM shares memory with the learner"
    elif rollout.offload.enabled and not (rollout.offload.offload_model or rollout.offload.offload_optimizer):
        yield "rollout_matching.offload", "moves nothing: set offload_model, offload_optimizer or both"
    if rollout.rollouts_per_sample == 1 and _non_default_keys(rollout.choice):
        yield "rollout_matching.choice", "not used: rollouts_per_sample is 1"
    elif rollout.choice.rule == "best" and "votes" in _non_default_keys(rollout.choice):
        yield "rollout_matching.choice.votes", "not used: the rule is best"
    if (
        "duplicate_iou" in _non_default_keys(rollout.correction)
        and rollout.correction.duplicates == "keep"
        and rollout.rollouts_per_sample == 1
    ):
        yield "rollout_matching.correction.duplicate_iou", "not used: duplicates are kept"
    sections = (
        ("offload", rollout.offload),
        ("repeat_terminate", rollout.repeat_terminate),
        ("noise", rollout.noise),
    )
    for name, section in sections:
        if section.model_fields_set - {"enabled"} and not section.enabled:
            yield f"rollout_matching.{name}", "not used: its enabled is false"
    for name, neutral in (("top_p", 1.0), ("top_k", -1)):
        if rollout.effective_decode_mode != "sampling" and getattr(rollout.decoding, name) != neutral:
            yield f"rollout_matching.decoding.{name}", f"not used by {rollout.effective_decode_mode} decoding"


def _non_default_keys(section: SettingsSection) -> set[str]:
    """Return the keys whose values are not the defaults."""
    return {
        name
        for name, field in type(section).model_fields.items()
        if getattr(section, name) != field.get_default(call_default_factory=True)
    }


def _idle_arguments(training: Training) -> Iterator[tuple[str, str]]:
    """Yield a note for every training argument that another argument makes ineffective."""
    trackers = set(training.trackers)
    trackio = bool({"trackio", "all"} & trackers)
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
        "run_name": trackers <= {"none", "tensorboard"} and "no integration in training.report_to shows it",
        **dict.fromkeys(TRACKIO, not trackio and "training.report_to does not name trackio"),
    }
    for name, reason in idle.items():
        if reason and name in _non_default_keys(training):
            yield f"training.{name}", f"not used: {reason}"
