"""`training`: packing, the arguments of `transformers.TrainingArguments` that have an effect, and those that are
refused.

training_arguments.json has the names, types, defaults and help texts of those that have an effect, written by
tools/mirror_training_arguments.py. The help texts are those of transformers (Apache-2.0). An argument is refused
if nothing reads it, or if what transformers does with it would be wrong here.
"""

import json
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model

from coordexp.config.sections import Fraction, PositiveInt, SettingsSection, Text, from_list

_TABLE = json.loads(Path(__file__).with_name("training_arguments.json").read_text(encoding="utf-8"))
TRANSFORMERS_VERSION: str = _TABLE["transformers"]
_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "dict": dict[str, Any]}
_TYPES |= {"list": tuple[str, ...], "null": type(None), "false": Literal[False]}


def _declare(row: dict[str, Any]) -> Any:
    """Return the type and the field of an argument."""
    kinds = [_TYPES[name] for name in row["types"]]
    if "choices" in row:
        kinds.insert(0, Literal[tuple(row["choices"])])
    declared: Any = reduce(or_, kinds)
    if "list" in row["types"]:
        declared = Annotated[declared, from_list]
    return declared, Field(row["default"], ge=row.get("minimum"), description=row["help"])


if TYPE_CHECKING:

    class TransformersArguments(SettingsSection):
        def __getattr__(self, name: str) -> Any: ...
else:
    _fields = {name: _declare(row) for name, row in _TABLE["arguments"].items()}
    TransformersArguments = create_model("TransformersArguments", __base__=SettingsSection, **_fields)


class Packing(SettingsSection):
    packing: bool = False
    """Pack several samples into one row of up to `global_max_length` tokens."""
    packing_buffer: PositiveInt = 256
    """Maximum number of examples per rank that wait for a row. With `packing`, at least
    `per_device_train_batch_size`. The run stops if more would have to wait."""
    packing_min_fill_ratio: Fraction = 0.85
    """Warn if the rows between two log lines are filled less than this on average. The warning is not repeated
    until they have been filled enough again."""
    packing_drop_last: bool = True
    """Do not train on examples that still wait at the end of the run. Must be true with `packing`."""


class Training(Packing, TransformersArguments):
    output_dir: Text = Field(examples=["runs/stage2"])
    """Folder for checkpoints, metrics and the resolved settings."""

    @property
    def trackers(self) -> tuple[str, ...]:
        """Return the names in `report_to`."""
        names = self.report_to or ()
        return (names,) if isinstance(names, str) else names


PACKING_KEYS = tuple(Packing.model_fields)  # the keys of `training` that transformers does not have
UNUSED = "has no effect: coordexp has its own data stream, loss, evaluation, progress bar and resume", "remove it"
_UNUSED = """
    accelerator_config average_tokens_across_devices batch_eval_metrics bf16_full_eval dataloader_drop_last
    dataloader_in_order dataloader_multiprocessing_context dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor disable_tqdm do_eval do_predict do_train enable_jit_checkpoint
    eval_accumulation_steps eval_do_concat_batches eval_use_gather_object fp16_full_eval ignore_data_skip
    include_for_metrics label_names length_column_name liger_kernel_config local_rank logging_nan_inf_filter
    parallelism_config prediction_loss_only remove_unused_columns restore_callback_states_from_checkpoint
    save_on_each_node use_cache
"""
_UPLOAD = (
    "is not supported: it would upload the whole run folder, with dumped samples and unfinished checkpoints",
    "remove it, and upload a finished checkpoint: hf upload REPOSITORY RUN/checkpoint-N",
)
# The problem and the fix of each refused argument. Those that a user would expect to work say why not.
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(_UNUSED.split(), UNUSED),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"), _UPLOAD),
    "hub_token": ("is not accepted: settings are logged, a token must not be", "set HF_TOKEN in the environment"),
    "label_smoothing_factor": (
        "has no effect: the loss is the declared objective, not the loss of the model",
        "remove it; target_sigma of a coord_reg module softens coordinate targets",
    ),
    "neftune_noise_alpha": ("is not supported: the noise would depend on how samples are packed", "remove it"),
    "use_liger_kernel": ("is not supported: its fused loss has no logits, which the objective needs", "remove it"),
    "auto_find_batch_size": (
        "is not supported: every checkpoint saves the batch size with the state of the data stream",
        "remove it; if memory runs out, lower training.per_device_train_batch_size or global_max_length",
    ),
    "save_only_model": (
        "is not supported: every checkpoint contains everything that --resume needs",
        "remove it; training.save_total_limit sets how many checkpoints are kept",
    ),
    "load_best_model_at_end": (
        "has no effect: a run ends with its last step, and its result is its checkpoints",
        "remove it; with training.metric_for_best_model, save_total_limit keeps the best checkpoint",
    ),
    "resume_from_checkpoint": (
        "has no effect: the command line decides whether to resume",
        "remove it; coordexp train --resume continues from the newest checkpoint of training.output_dir",
    ),
    "deepspeed": (
        "is not supported: no test trains with DeepSpeed",
        "remove it; training.fsdp: true shards weights, gradients and optimizer states over the ranks (FSDP2)",
    ),
}
