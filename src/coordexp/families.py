"""The kinds of models that can be trained, by the `model_type` in the config.json of a checkpoint.

Another package can add a kind with an entry point in the group `coordexp.families` (docs/extending.md).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordexp.errors import UserError, explain
from coordexp.extensions import find_extensions, load_extension, resolve_part


@dataclass(frozen=True)
class Family:
    """What is special about a kind of model. `model_class` is its class, as `module:name`."""

    model_class: str


FAMILIES = {"qwen3_vl": Family("transformers:Qwen3VLForConditionalGeneration")}


def find_family(folder: Path) -> Family:
    """Return the family of a checkpoint. Raise UserError if it is none that can be trained."""
    with explain((OSError, ValueError, AttributeError), f"{folder}/config.json cannot be read"):
        model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    added = find_extensions("families", taken=frozenset(FAMILIES))
    if model_type in added:
        family: Family = load_extension(added[model_type])
        return family
    known = ", ".join(sorted({*FAMILIES, *added}))
    problem = f"{folder}/config.json: model_type is {model_type!r}, which cannot be trained"
    raise UserError(problem, f"use a model of one of these types: {known}")


def load_model(folder: Path, **options: Any) -> Any:
    """Load the model of a checkpoint. `options` are those of `from_pretrained` in transformers.

    Raise UserError if a weight is missing, or is not one of the model: transformers would only log that, and
    leave random numbers in its place."""
    model_class = resolve_part(find_family(folder).model_class)
    model, info = model_class.from_pretrained(folder, output_loading_info=True, **options)
    for kind, reason in (("missing_keys", "is missing"), ("unexpected_keys", "is not a weight of this model")):
        names = sorted(info[kind])
        if names:
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{folder}: the weight {names[0]} {reason}{more}", "use a complete checkpoint")
    return model
