"""The shapes of Qwen3-VL models: the published sizes, and those of checkpoints on disk. This module imports no
torch: it reads config.json and the headers of weight files only.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordexp.errors import explain

PIXELS_OF_QWEN = 16_777_216  # `longest_edge` in the image processor of the published checkpoints
TOKENS_OF_QWEN = 151_669  # tokens of the published tokenizer; further rows of the embedding are unused
COORDINATES = 1000
ROWS_ARE_A_MULTIPLE_OF = 64  # as `coordexp model add-coords` writes them
CHANNELS = 3  # of an image
KNOWN_MODEL = "qwen3_vl"  # the `model_type` that the formulas are for

WeightShapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TextShape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def queries(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The width of all key heads together, which is also that of the values."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class VisionShape:
    hidden: int
    depth: int
    heads: int
    intermediate: int
    deepstack: tuple[int, ...]  # blocks whose output also goes to the first layers of the language model
    patch: int = 16
    merge: int = 2
    temporal_patch: int = 2
    positions: int = 2304

    @property
    def patch_values(self) -> int:
        """The number of values of one patch in the input of the vision tower."""
        return CHANNELS * self.temporal_patch * self.patch**2

    @property
    def patches_per_token(self) -> int:
        return self.merge**2

    @property
    def pixels_per_token(self) -> int:
        return (self.patch * self.merge) ** 2


@dataclass(frozen=True)
class ModelShape:
    """The shape of a Qwen3-VL. `largest_image` is the number of pixels to which its image processor shrinks larger
    images."""

    text: TextShape
    vision: VisionShape
    tied: bool
    largest_image: int = PIXELS_OF_QWEN

    def with_coordinate_tokens(self) -> "ModelShape":
        """Return the shape after `coordexp model add-coords`, for a checkpoint with the published tokenizer."""
        tokens = TOKENS_OF_QWEN + COORDINATES
        rows = math.ceil(tokens / ROWS_ARE_A_MULTIPLE_OF) * ROWS_ARE_A_MULTIPLE_OF
        return replace(self, text=replace(self.text, vocabulary=max(rows, self.text.vocabulary)))


_SMALL_TOWER = VisionShape(hidden=1024, depth=24, heads=16, intermediate=4096, deepstack=(5, 11, 17))
_LARGE_TOWER = VisionShape(hidden=1152, depth=27, heads=16, intermediate=4304, deepstack=(8, 16, 24))
PUBLISHED = {
    "2b": ModelShape(TextShape(2048, 28, 16, 8, 128, 6144, 151_936), _SMALL_TOWER, tied=True),
    "4b": ModelShape(TextShape(2560, 36, 32, 8, 128, 9728, 151_936), _SMALL_TOWER, tied=True),
    "8b": ModelShape(TextShape(4096, 36, 32, 8, 128, 12288, 151_936), _LARGE_TOWER, tied=False),
}


def expected_weights(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all weights of a checkpoint with this shape, in the order of the modules."""
    weights = {f"model.visual.{name}": size for name, size in _tower_weights(shape).items()}
    text = shape.text
    weights["model.language_model.embed_tokens.weight"] = (text.vocabulary, text.hidden)
    for index in range(text.layers):
        layer = f"model.language_model.layers.{index}"
        weights |= {f"{layer}.{name}": size for name, size in _layer_weights(text).items()}
    weights["model.language_model.norm.weight"] = (text.hidden,)
    if not shape.tied:
        weights["lm_head.weight"] = (text.vocabulary, text.hidden)
    return weights


def count_parameters(weights: WeightShapes) -> int:
    """Return the number of parameters in these weights."""
    return sum(map(math.prod, weights.values()))


def read_shape(folder: Path) -> ModelShape:
    """Return the shape of the checkpoint in a folder. Raise DataError if its config.json is not of a Qwen3-VL."""
    file = folder / "config.json"
    fix = "give the folder of a Qwen3-VL checkpoint in Hugging Face format"
    with explain((OSError, ValueError, KeyError, TypeError), f"{file} cannot be read", fix):
        config = json.loads(file.read_text(encoding="utf-8"))
        if config["model_type"] != KNOWN_MODEL:
            raise ValueError(f"its model_type is {config['model_type']}, and the formulas are for {KNOWN_MODEL}")
        text, vision = config["text_config"], config["vision_config"]
        heads = text["num_attention_heads"]
        shape = ModelShape(
            TextShape(
                hidden=text["hidden_size"],
                layers=text["num_hidden_layers"],
                heads=heads,
                kv_heads=text["num_key_value_heads"],
                head_dim=text.get("head_dim") or text["hidden_size"] // heads,
                intermediate=text["intermediate_size"],
                vocabulary=text["vocab_size"],
            ),
            VisionShape(
                hidden=vision["hidden_size"],
                depth=vision["depth"],
                heads=vision["num_heads"],
                intermediate=vision["intermediate_size"],
                deepstack=tuple(vision["deepstack_visual_indexes"]),
                patch=vision["patch_size"],
                merge=vision["spatial_merge_size"],
                temporal_patch=vision["temporal_patch_size"],
                positions=vision["num_position_embeddings"],
            ),
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        )
        return replace(shape, largest_image=_read_largest_image(folder))


def read_weights(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights in a folder, by name. Only the headers of the safetensors files are read.
    Raise DataError if a header cannot be read."""
    weights: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        problem = f"{path}: the header cannot be read"
        kinds = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError)
        with explain(kinds, problem, "copy the checkpoint again"), path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            weights |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return weights


def _read_largest_image(folder: Path) -> int:
    """Return the largest number of pixels of an image, from either file that processors are saved in."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        if not (folder / name).is_file():
            continue
        config: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
        config = config.get("image_processor", config)
        pixels = (config.get("size") or {}).get("longest_edge") or config.get("max_pixels")
        if pixels:
            return int(pixels)
    return PIXELS_OF_QWEN


def _layer_weights(text: TextShape) -> dict[str, tuple[int, ...]]:
    return {
        "self_attn.q_proj.weight": (text.queries, text.hidden),
        "self_attn.k_proj.weight": (text.keys, text.hidden),
        "self_attn.v_proj.weight": (text.keys, text.hidden),
        "self_attn.o_proj.weight": (text.hidden, text.queries),
        "self_attn.q_norm.weight": (text.head_dim,),
        "self_attn.k_norm.weight": (text.head_dim,),
        "mlp.gate_proj.weight": (text.intermediate, text.hidden),
        "mlp.up_proj.weight": (text.intermediate, text.hidden),
        "mlp.down_proj.weight": (text.hidden, text.intermediate),
        "input_layernorm.weight": (text.hidden,),
        "post_attention_layernorm.weight": (text.hidden,),
    }


def _tower_weights(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    vision = shape.vision
    width = vision.hidden
    weights: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (width, CHANNELS, vision.temporal_patch, vision.patch, vision.patch),
        "patch_embed.proj.bias": (width,),
        "pos_embed.weight": (vision.positions, width),
    }
    for index in range(vision.depth):
        block = {
            "norm1": _norm(width),
            "norm2": _norm(width),
            "attn.qkv": _linear(width, 3 * width),
            "attn.proj": _linear(width, width),
            "mlp.linear_fc1": _linear(width, vision.intermediate),
            "mlp.linear_fc2": _linear(vision.intermediate, width),
        }
        for module, parts in block.items():
            weights |= {f"blocks.{index}.{module}.{name}": size for name, size in parts.items()}
    merged = width * vision.patches_per_token
    mergers = {"merger": width} | {f"deepstack_merger_list.{k}": merged for k in range(len(vision.deepstack))}
    for merger, normed in mergers.items():
        modules = {
            "norm": _norm(normed),
            "linear_fc1": _linear(merged, merged),
            "linear_fc2": _linear(merged, shape.text.hidden),
        }
        for module, parts in modules.items():
            weights |= {f"{merger}.{module}.{name}": size for name, size in parts.items()}
    return weights


def _norm(width: int) -> dict[str, tuple[int, ...]]:
    return {"weight": (width,), "bias": (width,)}


def _linear(inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {"weight": (outputs, inputs), "bias": (outputs,)}
