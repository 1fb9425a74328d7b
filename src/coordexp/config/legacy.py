"""Keys that a config may not have, each with what to write instead.

Keys of older versions and of other tools are errors, never aliases. A value is still moved to the key that
replaces its own, so that the other checks see it and one old name gives one message.

Arguments of `transformers.TrainingArguments` are refused if nothing reads them, because coordexp has its own data
stream, loss, evaluation, progress bar and resume, or if what transformers does with them would be wrong here. The
table `REFUSED` is the only list of them. The loader and the reference page read it, and so does
tools/mirror_training_arguments.py, which mirrors all other arguments.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from coordexp.config.yaml_tree import KeyPath, Tree, Violation, fill, parse_path, value_at


@dataclass(frozen=True)
class LegacyKey:
    """A key that no longer exists. Its value, or `replacement` if given, moves to the key `new`.

    The key `also` is removed together with `old`, without a message of its own.
    """

    old: str
    fix: str
    new: str | None = None
    also: str | None = None
    replacement: Any = None


def _rename(old: str, new: str) -> LegacyKey:
    return LegacyKey(old, f"use {new} instead", new)


_SERVER = "rollout_matching.vllm.server"
_SERVERS = [{"base_url": "http://127.0.0.1:8000", "group_port": 51216}]
_LIST_SERVERS = (
    f"list each server under {_SERVER}.servers, e.g. "
    "servers: [{base_url: http://127.0.0.1:8000, group_port: 51216}]"
)

LEGACY_KEYS: tuple[LegacyKey, ...] = (
    _rename("rollout_matching.rollout_generate_batch_size", "rollout_matching.decode_batch_size"),
    _rename("rollout_matching.rollout_infer_batch_size", "rollout_matching.decode_batch_size"),
    _rename("rollout_matching.temperature", "rollout_matching.decoding.temperature"),
    _rename("rollout_matching.top_p", "rollout_matching.decoding.top_p"),
    _rename("rollout_matching.top_k", "rollout_matching.decoding.top_k"),
    LegacyKey(
        "rollout_matching.post_rollout_pack_scope",
        "remove it: packing always works on one micro-step; training.packing turns it on",
    ),
    LegacyKey(
        "rollout_matching.rollout_buffer", "remove it: rollouts are never reused; each is trained on at most once"
    ),
    LegacyKey(
        "rollout_matching.vllm.engine_args.quantization",
        "remove it: a weight sync replaces every weight of the engine by its name, and quantised layers have "
        "scales that no learner sends; engine_args.kv_cache_dtype: fp8 halves the memory of the KV cache",
    ),
    LegacyKey(f"{_SERVER}.base_url", _LIST_SERVERS, f"{_SERVER}.servers", f"{_SERVER}.group_port", _SERVERS),
    LegacyKey(f"{_SERVER}.group_port", _LIST_SERVERS, f"{_SERVER}.servers", None, _SERVERS),
    LegacyKey(
        "custom.coord_soft_ce_w1",
        "declare a coord_reg module under rollout_matching.pipeline.objective (stage1.pipeline.objective in "
        "Stage 1); its config has soft_ce_weight and w1_weight",
    ),
    # Names that other tools use.
    _rename("training.lr", "training.learning_rate"),
    _rename("training.batch_size", "training.per_device_train_batch_size"),
    _rename("training.epochs", "training.num_train_epochs"),
    _rename("model.adapter.r", "model.adapter.rank"),
    _rename("model.adapter.lora_alpha", "model.adapter.alpha"),
    _rename("model.adapter.lora_dropout", "model.adapter.dropout"),
    # Names of transformers 4 that transformers 5 does not have.
    _rename("training.evaluation_strategy", "training.eval_strategy"),
    LegacyKey(
        "training.warmup_ratio",
        "use training.warmup_steps: a number below 1 is a share of all steps",
        "training.warmup_steps",
    ),
    _rename("training.no_cuda", "training.use_cpu"),
    LegacyKey(
        "training.group_by_length", "remove it: samples are not grouped by length; training.packing fills rows"
    ),
    LegacyKey("training.overwrite_output_dir", "remove it: transformers 5 has no such argument"),
    LegacyKey("training.save_safetensors", "remove it: checkpoints are always safetensors"),
    LegacyKey("training.logging_dir", "remove it: transformers 5 logs below training.output_dir"),
    LegacyKey("training.push_to_hub_token", "set the HF_TOKEN environment variable: settings are logged"),
)

# Old names of module weights. Each is an alias in its own module only.
ALIASES = {
    "bbox_geo": {"bbox_smoothl1_weight": "smoothl1_weight", "bbox_ciou_weight": "ciou_weight"},
    "coord_reg": {"coord_soft_ce_weight": "soft_ce_weight", "coord_w1_weight": "w1_weight"},
}

OLD_SECTION: KeyPath = ("custom", "extra", "rollout_matching")

OLD_VARIANTS = {"rollout_matching_sft": "stage2_rollout_aligned"}


@dataclass(frozen=True)
class RejectedKey:
    """A key that was taken out of the tree: the violation, and the (old, new) paths of values that were moved."""

    violation: Violation
    moves: tuple[tuple[KeyPath, KeyPath], ...] = ()


def take_out_legacy(tree: Tree) -> Iterator[RejectedKey]:
    """Remove every legacy or refused key from `tree`, move its value to the key that replaces it, if there is one,
    and yield the violation."""
    yield from _take_out_old_section(tree)
    for legacy in LEGACY_KEYS:
        yield from _take_out_key(tree, legacy)
    yield from _take_out_aliases(tree)
    yield from _rename_variant(tree)
    yield from _take_out_refused(tree)


def _take_out_old_section(tree: Tree) -> Iterator[RejectedKey]:
    extra = value_at(tree, OLD_SECTION[:2])
    if not isinstance(extra, dict) or "rollout_matching" not in extra:
        return
    old = extra.pop("rollout_matching")
    if not extra:
        del tree["custom"]["extra"]
    if not isinstance(old, dict) or not old:
        fix = "write these settings under rollout_matching, at the top level"
        yield RejectedKey(Violation(OLD_SECTION, "moved", fix))
        return
    legacy_keys = {legacy.old: legacy for legacy in LEGACY_KEYS}
    for key, value in old.items():
        legacy = legacy_keys.get(f"rollout_matching.{key}", _rename("", f"rollout_matching.{key}"))
        here = (*OLD_SECTION, key)
        problem = "moved" if legacy.new else "removed"
        yield RejectedKey(Violation(here, problem, legacy.fix), _move(tree, value, here, legacy.new))


def _take_out_key(tree: Tree, legacy: LegacyKey) -> Iterator[RejectedKey]:
    path = parse_path(legacy.old)
    container = value_at(tree, path[:-1])
    if not isinstance(container, dict) or path[-1] not in container:
        return
    value = container.pop(path[-1])
    if legacy.also:
        container.pop(parse_path(legacy.also)[-1], None)
    problem = "renamed" if legacy.new and legacy.replacement is None else "removed"
    violation = Violation(path, problem, legacy.fix)
    if legacy.replacement is not None:
        value = legacy.replacement
    yield RejectedKey(violation, _move(tree, value, path, legacy.new))


def _take_out_aliases(tree: Tree) -> Iterator[RejectedKey]:
    for path in (("rollout_matching", "pipeline"), ("stage1", "pipeline")):
        modules = value_at(tree, (*path, "objective"))
        for index, module in enumerate(modules if isinstance(modules, list) else []):
            config = value_at(module, ("config",))
            name = value_at(module, ("name",))
            for alias, new in ALIASES.get(name, {}).items() if isinstance(name, str) else ():
                if isinstance(config, dict) and alias in config:
                    here: KeyPath = (*path, "objective", index, "config", alias)
                    moves = _move(tree, config.pop(alias), here, (*here[:-1], new))
                    yield RejectedKey(Violation(here, "renamed", f"use {new} instead"), moves)


def _rename_variant(tree: Tree) -> Iterator[RejectedKey]:
    variant = value_at(tree, ("custom", "trainer_variant"))
    if isinstance(variant, str) and variant in OLD_VARIANTS:
        new = tree["custom"]["trainer_variant"] = OLD_VARIANTS[variant]
        path: KeyPath = ("custom", "trainer_variant")
        yield RejectedKey(Violation(path, f"{variant} is the old name", f"write trainer_variant: {new}"))


def _move(tree: Tree, value: Any, old: KeyPath, new: str | KeyPath | None) -> tuple[tuple[KeyPath, KeyPath], ...]:
    """Write the value at `new` unless that has a value already. Return the (old, new) paths of moved values."""
    if new is None:
        return ()
    target = parse_path(new) if isinstance(new, str) else new
    return tuple(((*old, *filled[len(target) :]), filled) for filled in fill(tree, value, target))


class RefusedArgument(NamedTuple):
    problem: str
    fix: str


_NO_LOADER = "has no effect: there is no DataLoader; the next row is always made while a row is trained"
_NO_LOOP = "has no effect: evaluation scores generated answers, and there is no prediction loop"
_NO_PUSH = "has no effect: training.push_to_hub is not supported"
_THREADS = "remove it; training.dataloader_num_workers sets how many threads read images"
_UPLOAD = "remove it, and upload a finished checkpoint: hf upload REPOSITORY RUN/checkpoint-N"

REFUSED: dict[str, RefusedArgument] = {
    # The loss is the declared objective, computed on rows.
    "average_tokens_across_devices": RefusedArgument(
        "has no effect: the loss is always normalised over the rows of all ranks", "remove it"
    ),
    "label_smoothing_factor": RefusedArgument(
        "has no effect: the loss is the declared objective, not the loss of the model",
        "remove it; target_sigma of a coord_reg module softens coordinate targets",
    ),
    "label_names": RefusedArgument(
        "has no effect: the objective reads its targets from the row, not from named labels", "remove it"
    ),
    "neftune_noise_alpha": RefusedArgument(
        "is not supported: the noise would depend on how many samples share a packed row", "remove it"
    ),
    "use_liger_kernel": RefusedArgument(
        "is not supported: its fused loss computes no logits, and the objective needs them", "remove it"
    ),
    "liger_kernel_config": RefusedArgument(
        "has no effect: training.use_liger_kernel is not supported", "remove it"
    ),
    "use_cache": RefusedArgument(
        "has no effect: training uses no key-value cache, and generation always uses one", "remove it"
    ),
    # The data stream.
    "auto_find_batch_size": RefusedArgument(
        "is not supported: the batch size is part of the state of the data stream, which every checkpoint saves",
        "remove it; if memory runs out, lower training.per_device_train_batch_size or global_max_length",
    ),
    "dataloader_drop_last": RefusedArgument(
        "has no effect: the stream of samples continues into the next epoch, so no batch is incomplete",
        "remove it",
    ),
    "dataloader_pin_memory": RefusedArgument(_NO_LOADER, "remove it"),
    "dataloader_persistent_workers": RefusedArgument(_NO_LOADER, _THREADS),
    "dataloader_prefetch_factor": RefusedArgument(_NO_LOADER, _THREADS),
    "dataloader_multiprocessing_context": RefusedArgument(_NO_LOADER, _THREADS),
    "dataloader_in_order": RefusedArgument(
        _NO_LOADER, "remove it; the order of samples follows from the seed alone"
    ),
    "remove_unused_columns": RefusedArgument(
        "has no effect: samples are records, not columns of a dataset", "remove it"
    ),
    "length_column_name": RefusedArgument(
        "has no effect: samples are not grouped by length", "remove it; training.packing fills rows instead"
    ),
    # Evaluation generates answers and scores them.
    "prediction_loss_only": RefusedArgument(_NO_LOOP, "remove it"),
    "eval_do_concat_batches": RefusedArgument(_NO_LOOP, "remove it"),
    "eval_use_gather_object": RefusedArgument(_NO_LOOP, "remove it"),
    "eval_accumulation_steps": RefusedArgument(
        _NO_LOOP, "remove it; rollout_matching.decode_batch_size sets how many answers are generated at once"
    ),
    "include_for_metrics": RefusedArgument(_NO_LOOP, "remove it"),
    "batch_eval_metrics": RefusedArgument(_NO_LOOP, "remove it"),
    "bf16_full_eval": RefusedArgument(_NO_LOOP, "remove it; model.dtype sets the data type of the weights"),
    "fp16_full_eval": RefusedArgument(_NO_LOOP, "remove it; model.dtype sets the data type of the weights"),
    # Logs and the progress bar.
    "logging_nan_inf_filter": RefusedArgument(
        "has no effect: the loss of the objective is logged unfiltered, including NaN and Inf", "remove it"
    ),
    "disable_tqdm": RefusedArgument(
        "has no effect: coordexp draws its own progress bar, and only on a terminal",
        "remove it; write the output to a file to get plain lines",
    ),
    # Checkpoints and resume.
    "save_only_model": RefusedArgument(
        "is not supported: every checkpoint contains everything that --resume needs",
        "remove it; training.save_total_limit sets how many checkpoints are kept",
    ),
    "save_on_each_node": RefusedArgument(
        "is not supported: a checkpoint is complete only if the files of all ranks are in one folder",
        "remove it, and put training.output_dir on a file system that all nodes share",
    ),
    "enable_jit_checkpoint": RefusedArgument(
        "is not supported: SIGTERM already finishes the step, saves a checkpoint and ends the run", "remove it"
    ),
    "load_best_model_at_end": RefusedArgument(
        "has no effect: a run ends with its last step, and its result is its checkpoints",
        "remove it; with training.metric_for_best_model, save_total_limit keeps the best checkpoint, and "
        "trainer_state.json names it",
    ),
    "ignore_data_skip": RefusedArgument(
        "has no effect: a resumed run continues with the very next sample",
        "remove it; coordexp train --resume continues from the newest checkpoint",
    ),
    "resume_from_checkpoint": RefusedArgument(
        "has no effect: the command line decides whether to resume",
        "remove it, and run coordexp train --resume, which continues from the newest checkpoint of "
        "training.output_dir",
    ),
    "restore_callback_states_from_checkpoint": RefusedArgument(
        "is not supported: a run that was stopped by a signal would restore its own stop", "remove it"
    ),
    # The Hugging Face Hub.
    "push_to_hub": RefusedArgument(
        "is not supported: it would upload the whole run folder, dumped samples included, and checkpoints before "
        "they are complete",
        _UPLOAD,
    ),
    "hub_model_id": RefusedArgument(_NO_PUSH, _UPLOAD),
    "hub_strategy": RefusedArgument(_NO_PUSH, _UPLOAD),
    "hub_always_push": RefusedArgument(_NO_PUSH, _UPLOAD),
    "hub_revision": RefusedArgument(_NO_PUSH, _UPLOAD),
    "hub_token": RefusedArgument(
        "is not accepted: settings are logged and written to run folders, and a token must not appear there",
        "set the HF_TOKEN environment variable",
    ),
    # Sharding.
    "deepspeed": RefusedArgument(
        "is not supported: no test trains with DeepSpeed",
        "remove it; training.fsdp: true shards weights, gradients and optimizer states over the ranks (FSDP2)",
    ),
    # Decided by the command or by torchrun.
    "do_train": RefusedArgument(
        "has no effect: the command decides what is done", "remove it; coordexp train trains"
    ),
    "do_eval": RefusedArgument(
        "has no effect: training.eval_strategy decides when to evaluate",
        "remove it; set training.eval_strategy: steps, or run coordexp evaluate on predictions",
    ),
    "do_predict": RefusedArgument(
        "has no effect: the command decides what is done", "remove it; coordexp predict predicts"
    ),
    "local_rank": RefusedArgument("is not accepted: torchrun gives each process its rank", "remove it"),
    "parallelism_config": RefusedArgument(
        "is not accepted: it is a Python object, which a YAML file cannot contain",
        "remove it; use training.fsdp",
    ),
}


def _take_out_refused(tree: Tree) -> Iterator[RejectedKey]:
    training = tree.get("training")
    if not isinstance(training, dict):
        return
    for name in [name for name in training if name in REFUSED]:
        del training[name]
        yield RejectedKey(Violation(("training", name), *REFUSED[name]))
