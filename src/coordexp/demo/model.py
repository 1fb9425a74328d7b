"""Creates a tiny model of any family with random weights, in a form that transformers and vLLM can load.

It has one of two tokenizers with the 1,000 coordinate tokens. Both are byte-level BPE with Qwen's chat and vision
tokens. The small one has about 1,300 entries and is trained on answers in the format of this project. With the
real one, most of the cost of training on a CPU would be its 152,669 logits. The real one is rebuilt from the ranks
in the `dashscope` wheel and is used in token-level tests, because it merges punctuation as Qwen3-VL does.
"""

import importlib.util
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from coordexp.answers.expand import ordinal_rows
from coordexp.answers.table import COORD_TOKENS
from coordexp.data import BINS
from coordexp.errors import UserError
from coordexp.extensions import resolve_part
from coordexp.families import FAMILIES, keep_published_layout
from coordexp.files import is_free
from coordexp.shapes import ModelShape, TextShape, VisionShape

Vocabulary = Literal["small", "qwen"]

NATIVE_ENTRIES = 420  # of the small tokenizer with native answers: every word of both formats is one token

# In Qwen's order, so that they get the same ids as in Qwen, after its 151,643 ranks.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_ADDED_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

# How Qwen splits text before it merges bytes: contractions, words, single digits, punctuation, white space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(
    vocabulary: Vocabulary, *, coords: bool = True, native: bool = False
) -> PreTrainedTokenizerFast:
    """Return one of the two tokenizers, with or without the coordinate tokens. With `native`, the small one is
    trained on native answers too."""
    core = _train_small(native) if vocabulary == "small" else _rebuild_qwen()
    added = [*SPECIAL_TOKENS] if vocabulary == "small" else [*SPECIAL_TOKENS, *PLAIN_ADDED_TOKENS]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    plain = [token for token in added if token not in SPECIAL_TOKENS] + [*(COORD_TOKENS if coords else ())]
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",  # noqa: S106
        pad_token="<|endoftext|>",  # noqa: S106
        additional_special_tokens=[*SPECIAL_TOKENS[1:]],
        model_max_length=131072,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def qwen_ranks_file() -> Path:
    """Return the path of `qwen.tiktoken` in the installed dashscope package, without importing the package."""
    spec = importlib.util.find_spec("dashscope")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "the real Qwen vocabulary is read from the dashscope package, which is not installed",
            "run pip install dashscope, or use the small vocabulary",
        )
    return Path(spec.submodule_search_locations[0]) / "resources" / "qwen.tiktoken"


def _rebuild_qwen() -> Tokenizer:
    core = TikTokenConverter(vocab_file=str(qwen_ranks_file()), pattern=SPLIT).converted()
    core.normalizer = normalizers.NFC()
    return core


def _train_small(native: bool) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"), _byte_level()]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    entries = NATIVE_ENTRIES if native else 300 + len(alphabet) // 8
    trainer = trainers.BpeTrainer(vocab_size=entries, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(itertools.chain(_corpus(), _native_corpus() if native else ()), trainer)
    return core


def _byte_level() -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _names() -> list[str]:
    colours = ("red", "green", "blue", "yellow", "purple", "orange", "black", "white")
    shapes = ("circle", "square", "triangle", "star", "hexagon", "cross")
    return [f"{colour} {shape}" for colour, shape in itertools.product(colours, shapes)]


def _corpus() -> Iterator[str]:
    """Yield answers without their coordinates, and prompts. The same ones every time."""
    chooser = random.Random(0)  # noqa: S311
    for _ in range(400):
        objects = []
        for number, name in enumerate(chooser.sample(_names(), chooser.randint(1, 30)), start=1):
            geometry = (
                '"bbox_2d": ["", "", "", ""]' if chooser.random() < 0.6 else '"poly": ["", "", "", "", "", ""]'
            )
            fields = [f'"desc": "{name}"', geometry]
            objects.append(f'"object_{number}": {{{", ".join(fields)}}}')
        yield "{" + ", ".join(objects) + "}"
        yield "user\nDetect all objects.\nassistant\n"


def _native_corpus() -> Iterator[str]:
    """Yield native answers. The same ones every time. Digits are split before bytes are merged, so that the
    numbers do not matter."""
    chooser = random.Random(0)  # noqa: S311
    for count in [0, *(chooser.randint(1, 30) for _ in range(400))]:
        names = chooser.choices(_names(), k=count)
        lines = [f'\t{{"bbox_2d": [74, 361, 324, 808], "label": "{name}"}}' for name in names]
        yield "```json\n[" + ("\n" + ",\n".join(lines) + "\n" if lines else "") + "]\n```"


MERGE = 2
HEAD_OF_QWEN, HEIGHT_OF_QWEN = 128, 20  # the published head size, and its part for vertical positions
# Standard deviations of the ordinal rows of coordinates and of image positions before training. On scenes with one
# object, after 200 steps of 16 scenes, W1 was 0.090 without both, 0.057 with positions at 0.5, and 0.039 with
# positions at 1.0 and coordinates at 0.15.
COORD_DEVIATION = 0.15
POSITION_DEVIATION = 0.7


@dataclass(frozen=True)
class Size:
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    vision_hidden: int = 64
    vision_depth: int = 2
    vision_heads: int = 2
    patch: int = 16
    max_positions: int = 4096


# The size for scenes of 64 x 64 pixels. Each image token covers 16 x 16 pixels.
SCENES = Size(patch=8, vision_hidden=64)


def make_model(
    folder: Path,
    vocabulary: Vocabulary = "small",
    *,
    family: str = "qwen3_vl",
    tied: bool = True,
    seed: int = 0,
    spread: float = 1.0,
    coords: bool = True,
    native: bool = False,
    ordinal: bool = False,
    size: Size | None = None,
) -> Path:
    """Write model, tokenizer and processor to `folder`, which must be new or empty, and return the folder.

    `family` is a key of FAMILIES. `spread` multiplies every weight matrix. At 1 the model is ready for training;
    untrained, it repeats one token for any image. At 6 its answers vary and depend on the image, which tests of
    generation need. Without `coords` the model has no coordinate tokens, like a checkpoint before `coordexp model
    add-coords`. With `native`, the small tokenizer has the words of native answers. With `ordinal`, neighbouring
    coordinate tokens start with similar embeddings, and so do neighbouring positions of the image, if the family
    has embeddings for them.
    """
    if not is_free(folder):
        raise UserError(f"{folder} is not an empty folder", "give another folder, or remove this one")
    size = size or Size()
    tokenizer = make_tokenizer(vocabulary, coords=coords, native=native)
    config = _config(family, tokenizer, size, tied)
    model = _random_model(config, seed, spread)
    if ordinal:
        if coords:
            first = tokenizer.convert_tokens_to_ids(COORD_TOKENS[0])
            _make_coordinates_ordinal(model, range(first, first + len(COORD_TOKENS)), seed)
        if hasattr(model.model.visual, "pos_embed"):
            _make_positions_ordinal(model, seed)
    model.generation_config = greedy_generation(tokenizer)
    keep_published_layout(model)
    model.save_pretrained(folder)
    side = size.patch * MERGE
    make_processor(config, tokenizer, (side * side, 1024 * 1024)).save_pretrained(folder)
    return folder


def _config(family: str, tokenizer: PreTrainedTokenizerFast, size: Size, tied: bool) -> PreTrainedConfig:
    text = TextShape(
        hidden=size.hidden,
        layers=size.layers,
        heads=size.heads,
        kv_heads=size.heads // 2,
        head_dim=size.hidden // size.heads,
        intermediate=2 * size.hidden,
        vocabulary=math.ceil(len(tokenizer) / 64) * 64,
    )
    vision = VisionShape(
        hidden=size.vision_hidden,
        depth=size.vision_depth,
        heads=size.vision_heads,
        intermediate=2 * size.vision_hidden,
        deepstack=(size.vision_depth - 1,),
        patch=size.patch,
        merge=MERGE,
        positions=256,
    )
    shape = ModelShape(text, vision, tied)
    return make_config(tokenizer, shape, family=family, rope_theta=10000.0, max_positions=size.max_positions)


def make_config(
    tokenizer: PreTrainedTokenizerFast,
    shape: ModelShape,
    *,
    family: str = "qwen3_vl",
    rope_theta: float,
    max_positions: int,
) -> PreTrainedConfig:
    """Return the config of a model with this shape and the special tokens of this tokenizer."""
    text, vision, token_id = shape.text, shape.vision, tokenizer.convert_tokens_to_ids
    text_config = {
        "vocab_size": text.vocabulary,
        "hidden_size": text.hidden,
        "intermediate_size": text.intermediate,
        "num_hidden_layers": text.layers,
        "num_attention_heads": text.heads,
        "num_key_value_heads": text.kv_heads,
        "rope_parameters": _rope(family, text.head_dim, rope_theta),
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": shape.tied,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision_config = {
        "depth": vision.depth,
        "hidden_size": vision.hidden,
        "intermediate_size": vision.intermediate,
        "num_heads": vision.heads,
        "out_hidden_size": text.hidden,
        "patch_size": vision.patch,
        "spatial_merge_size": vision.merge,
        "temporal_patch_size": vision.temporal_patch,
    }
    return AutoConfig.for_model(
        family,
        text_config=text_config | _own_text_settings(family, text),
        vision_config=vision_config | _own_vision_settings(family, vision),
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=shape.tied,
    )


def _rope(family: str, head: int, theta: float) -> dict[str, Any]:
    """Return the settings of the rotary positions for attention heads of this size. Their frequencies are divided
    among time, height and width."""
    rotated = head // 2 if family == "qwen3_5" else head
    side = HEIGHT_OF_QWEN if rotated == HEAD_OF_QWEN else rotated // 6
    rope = {
        "rope_type": "default",
        "rope_theta": theta,
        "mrope_section": [rotated // 2 - 2 * side, side, side],
    }
    if family == "qwen2_5_vl":
        return rope
    return rope | {"mrope_interleaved": True, "partial_rotary_factor": rotated / head}


def _own_text_settings(family: str, text: TextShape) -> dict[str, Any]:
    """Return the settings of the language model that not all families have."""
    head = text.head_dim
    if family == "qwen2_5_vl":
        return {}
    if family == "qwen3_vl_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 3 * text.hidden // 4}
        experts["norm_topk_prob"] = True  # only vLLM reads it
        return {"head_dim": head, **experts}
    if family == "qwen3_5":
        linear_heads = {"linear_num_key_heads": text.kv_heads, "linear_num_value_heads": text.heads}
        # Linear attention first, and one layer of full attention at the end.
        layer_types = ["linear_attention"] * (text.layers - 1) + ["full_attention"]
        widths = {"linear_key_head_dim": head, "linear_value_head_dim": head}
        return {"head_dim": head, "layer_types": layer_types, **linear_heads, **widths}
    return {"head_dim": head}


def _own_vision_settings(family: str, vision: VisionShape) -> dict[str, Any]:
    """Return the settings of the vision tower that not all families have."""
    if family == "qwen2_5_vl":  # windows of 2 x 2 image tokens, and a last block that sees the whole image
        return {"window_size": 2 * vision.merge * vision.patch, "fullatt_block_indexes": [vision.depth - 1]}
    positions = {"num_position_embeddings": vision.positions}
    if family == "qwen3_5":
        return positions
    return positions | {"deepstack_visual_indexes": list(vision.deepstack)}


def _random_model(config: PreTrainedConfig, seed: int, spread: float) -> Any:
    model_class = resolve_part(FAMILIES[config.model_type].model_class)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32)
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.mul_(spread)
    return model


def _make_coordinates_ordinal(model: Any, ids: Sequence[int], seed: int) -> None:
    """Set the embeddings of the coordinate tokens to ordinal rows around the mean of all other embeddings.

    The input and the output embedding get the same rows, whether they are tied or not.
    """
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    with torch.no_grad():
        for layer in {id(layer.weight): layer for layer in layers}.values():
            others = torch.ones(len(layer.weight), dtype=torch.bool)
            others[list(ids)] = False
            mean = layer.weight[others].float().mean(0)
            rows = ordinal_rows(layer.weight.shape[1], seed) * COORD_DEVIATION + mean
            layer.weight[list(ids)] = rows.to(layer.weight)


def _make_positions_ordinal(model: Any, seed: int) -> None:
    """Set the position embedding of an image patch to the sum of ordinal rows for its row and its column.

    With that, the model can read positions from the first step on.
    """
    rows = model.model.visual.pos_embed.weight
    side = math.isqrt(len(rows))
    bins = torch.arange(side) * (BINS - 1) // (side - 1)
    down, across = (ordinal_rows(rows.shape[1], seed + k)[bins] for k in (1, 2))
    with torch.no_grad():
        rows.copy_(((down[:, None] + across[None]) / math.sqrt(2) * POSITION_DEVIATION).flatten(0, 1))


def greedy_generation(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Return the generation config of a model that answers greedily until the end of its turn."""
    return GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )


def make_processor(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, pixels: tuple[int, int]) -> Any:
    """Return the processor of a model. Images are resized to between `pixels[0]` and `pixels[1]` pixels."""
    grid = {"patch_size": config.vision_config.patch_size, "merge_size": MERGE, "temporal_patch_size": 2}
    images = Qwen2VLImageProcessor(
        **grid,
        size={"shortest_edge": pixels[0], "longest_edge": pixels[1]},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return PROCESSOR_MAPPING[type(config)](
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=VIDEO_PROCESSOR_MAPPING[type(config)]["torchvision"](**grid),
        chat_template=CHAT_TEMPLATE,
    )
