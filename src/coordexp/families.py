"""The kinds of models that can be trained, by the `model_type` in the config.json of a checkpoint.

Another package can add a kind with an entry point in the group `coordexp.families` (docs/extending.md).
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordexp.errors import UserError, explain
from coordexp.extensions import find_extensions, load_extension, resolve_part

if TYPE_CHECKING:
    from torch import Tensor


# All families have Qwen's special tokens. The first of STOP_TOKENS ends a turn.
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")
# The parts of a model that `model.freeze` names, as patterns of module names. The aligner maps the output of the
# vision tower to embeddings of the language model.
_ALIGNER = r"merger|deepstack_merger_list"
PARTS = {"vision": rf"(?:.*\.)?visual\.(?!(?:{_ALIGNER})\.).+", "aligner": rf"(?:.*\.)?visual\.(?:{_ALIGNER})\..+"}
PLACEHOLDER_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
COPY_AGAIN = "download it again (hf download), or copy it again"
# How tokens begin that mark a place in an image. A question or an answer may contain them.
PLACE_TOKENS = ("<|coord_", "<|object_ref_", "<|box_", "<|quad_")


@dataclass(frozen=True)
class Family:
    """The properties of a kind of model. `model_class` is its class, as `module:name`. `prepare`, if given, is
    a function in the same form, which is called with every model that is loaded. `has_relative_boxes` says that
    the published models write boxes as numbers from 0 to 1000, relative to the image."""

    model_class: str
    prepare: str = ""
    has_relative_boxes: bool = False


FAMILIES = {
    "qwen3_vl": Family("transformers:Qwen3VLForConditionalGeneration", has_relative_boxes=True),
    "qwen2_5_vl": Family("transformers:Qwen2_5_VLForConditionalGeneration"),  # pixels of the resized image
    "qwen3_vl_moe": Family("transformers:Qwen3VLMoeForConditionalGeneration", has_relative_boxes=True),
    "qwen3_5": Family(
        "transformers:Qwen3_5ForConditionalGeneration",
        "coordexp.objective.attention:separate_linear_attention",
        has_relative_boxes=True,
    ),
}


def is_frozen(name: str, parts: Collection[str]) -> bool:
    """Return whether a module or a weight belongs to one of the parts that `model.freeze` names."""
    return any(re.fullmatch(PARTS[part], name) for part in parts)


def read_model_type(folder: Path) -> Any:
    """Return the `model_type` of a checkpoint, or None if its config.json has none. Raise UserError if that file
    cannot be read."""
    kinds = (OSError, ValueError, AttributeError, RecursionError)
    with explain(kinds, f"{folder}/config.json cannot be read", COPY_AGAIN):
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")


def find_family(folder: Path) -> Family:
    """Return the family of a checkpoint. Raise UserError if it is none that can be trained."""
    model_type = read_model_type(folder)
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
    leave random numbers in its place. Files other than safetensors are never read."""
    family = find_family(folder)
    check_files(folder)
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no weights: it has no *.safetensors file", COPY_AGAIN)
    options |= {"output_loading_info": True, "use_safetensors": True}
    model, info = resolve_part(family.model_class).from_pretrained(folder, **options)
    for kind, reason in (("missing_keys", "is missing"), ("unexpected_keys", "is not a weight of this model")):
        names = sorted(info[kind])
        if names:
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{folder}: the weight {names[0]} {reason}{more}", "use a complete checkpoint")
    keep_published_layout(model)
    if family.prepare:
        resolve_part(family.prepare)(model)
    return model


def check_files(folder: Path) -> None:
    """Raise UserError if a file of a model folder is damaged, e.g. by a download that broke off. The errors of
    transformers do not name the file."""
    from safetensors import SafetensorError, safe_open  # not every command has it

    for file in sorted((*folder.glob("*config.json"), *folder.glob("*.index.json"))):
        with explain((OSError, ValueError, RecursionError), f"{file} cannot be read", COPY_AGAIN):
            json.loads(file.read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with explain((OSError, SafetensorError), f"{file} cannot be read", COPY_AGAIN), safe_open(file, "np"):
            pass  # its header has been compared with its length


def keep_published_layout(model: Any) -> None:
    """Make transformers save weights in the layout of the published checkpoints, which vLLM reads.

    The experts of Qwen3-VL-MoE are transposed when they are loaded. transformers transposes a weight only if its
    shape is not the one in memory, so it would save them as they are in memory."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, Transpose

    if getattr(model, "_weight_conversions", None) is None:  # the model was not loaded, but created
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [entry for entry in conversions if not isinstance(entry, PrefixChange)]
    for conversion in model._weight_conversions:
        for operation in getattr(conversion, "operations", ()):
            if isinstance(operation, Transpose):
                operation.check_dims = False


def to_checkpoint_weights(model: Any, name: str, weight: "Tensor") -> "dict[str, Tensor]":
    """Return a weight with the name and in the layout that it has in a checkpoint. `model` is the one that
    `load_model` returned."""
    if not getattr(model, "_weight_conversions", None):  # weights are in a checkpoint as they are in memory
        return {name: weight}
    from transformers.core_model_loading import revert_weight_conversion

    weights: dict[str, Tensor] = revert_weight_conversion(model, {name: weight})
    return weights
