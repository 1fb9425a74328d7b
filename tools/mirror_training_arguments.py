"""Write src/coordexp/config/training_arguments.json from the installed transformers.

`coordexp.config` must not import transformers, so this script copies the names, types, defaults and help texts of
the `transformers.TrainingArguments` that have an effect. A test fails if the copy is out of date.

    python tools/mirror_training_arguments.py
"""

import dataclasses
import enum
import json
import re
import types
import typing
from pathlib import Path
from typing import Any

import transformers
from transformers import TrainingArguments

from coordexp.config.training import REFUSED

TARGET = Path(__file__).parents[1] / "src/coordexp/config/training_arguments.json"

# What differs from transformers: a type that 5.19 accepts although its annotation does not include it, bounds that
# it checks late or not at all, values that rows cannot honour, and what an argument means here.
OWN: dict[str, dict[str, Any]] = {
    "per_device_train_batch_size": {"minimum": 1, "help": "Samples per device and micro-step."},
    "gradient_accumulation_steps": {"minimum": 1, "help": "Micro-steps per optimizer step."},
    "learning_rate": {"minimum": 0},
    "include_num_input_tokens_seen": {
        "types": ["bool"],
        "choices": ["all", "non_padding", "no"],
        "help": "Log the number of tokens that were trained on. true, all and non_padding mean the same, because "
        "rows have no padding.",
    },
    "logging_strategy": {"choices": ["no", "steps"]},
    "eval_strategy": {"choices": ["no", "steps"]},
    "save_strategy": {"choices": ["no", "steps", "best"]},
    "train_sampling_strategy": {
        "choices": ["random", "sequential"],
        "help": "Order of the samples: random, or sequential, that of the file.",
    },
    "per_device_eval_batch_size": {
        "minimum": 1,
        "help": "Has no effect. `rollout_matching.decode_batch_size` sets how many answers evaluation generates "
        "at once.",
    },
    "hub_private_repo": {
        "help": "Whether the Space of `trackio_space_id` is private. null: the default of its owner."
    },
    "metric_for_best_model": {"help": "Metric of evaluation that decides which checkpoint is the best."},
    "dataloader_num_workers": {
        "minimum": 0,
        "help": "Threads per rank that read images, while the row before is trained. 0: one thread.",
    },
    "fsdp": {"types": ["bool", "str", "null"]},
    "debug": {"help": "Enable one or more debug features, e.g. underflow_overflow."},
}


def render() -> str:
    """Return the table as JSON, with one argument per line."""
    fields = [f for f in dataclasses.fields(TrainingArguments) if f.init and f.name not in REFUSED]
    rows = ",\n".join(f"  {json.dumps(f.name)}: {json.dumps(_row(f))}" for f in fields)
    return f'{{"transformers": "{transformers.__version__}", "arguments": {{\n{rows}\n}}}}\n'


def _row(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    default = field.default_factory() if callable(field.default_factory) else field.default
    default = default.value if isinstance(default, enum.Enum) else default
    members = typing.get_args(field.type) if _is_union(field.type) else (field.type,)
    enums = [m for m in members if isinstance(m, type) and issubclass(m, enum.Enum)]
    choices = field.metadata.get("choices") or [value.value for kind in enums for value in kind]
    if field.name == "optim":  # these update weights during every backward pass, so rows cannot be accumulated
        choices = [name for name in choices if name not in ("lomo", "adalomo")]
    kinds = ["null"] * (type(None) in members) if choices else sorted(map(_kind, members), key=_null_last)
    row = {"types": kinds, "default": default, "help": _help(field)}
    return row | ({"choices": list(choices)} if choices else {}) | OWN.get(field.name, {})


def _help(field: "dataclasses.Field[Any]") -> str:
    """Return the first sentence of the help text, in ASCII, on one line."""
    text = re.sub(r"\s+", " ", field.metadata.get("help") or f"transformers' `{field.name}`.").strip()
    text = text.encode("ascii", "replace").decode()
    sentence = re.match(r".*?[a-z`')0-9][.](?=\s+[A-Z`]|$)", text)
    return sentence.group(0) if sentence else text


def _null_last(text: str) -> tuple[bool, str]:
    return text == "null", text


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _kind(kind: Any) -> str:
    """Return the name of a type in the table. `false` is the only literal that an argument has."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return json.dumps(typing.get_args(kind)[0])
    names = {type(None): "null", dict: "dict", list: "list", str: "str", int: "int", float: "float", bool: "bool"}
    return names[origin or kind]


if __name__ == "__main__":
    TARGET.write_text(render())
