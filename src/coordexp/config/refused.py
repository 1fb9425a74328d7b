"""Arguments of `transformers.TrainingArguments` that a config may not have, each with the reason and the fix.

An argument is refused if nothing reads it, because coordexp has its own data stream, loss, evaluation, progress
bar and resume, or if what transformers does with it would be wrong here. This table is the only list of them. The
loader and the reference page read it, and so does tools/mirror_training_arguments.py, which mirrors all other
arguments.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from coordexp.config.violations import Violation


class RefusedArgument(NamedTuple):
    problem: str
    fix: str


_NO_LOADER = "has no effect: there is no DataLoader, and nothing is read ahead"
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
        "remove it; use training.fsdp or training.deepspeed",
    ),
}


def take_out_refused(tree: dict[str, Any]) -> Iterator[Violation]:
    """Remove every refused argument from `training` and yield a violation for each."""
    training = tree.get("training")
    if not isinstance(training, dict):
        return
    for name in [name for name in training if name in REFUSED]:
        del training[name]
        yield Violation(("training", name), *REFUSED[name])
