"""Makes a tiny Qwen3-VL with random weights and saves it as transformers and vLLM load it."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from coordexp.data import BINS
from coordexp.demo.vocabulary import CHAT_TEMPLATE, Vocabulary, make_tokenizer
from coordexp.folders import is_free
from coordexp.vocab import COORD_TOKENS
from coordexp.vocab.ordinal import ordinal_rows, start_ordinal

MERGE = 2
# How strong the ordinal rows of coordinates and image positions are at the start. On scenes with one object, after
# 200 steps of 16: W1 0.090 without both, 0.057 with positions at 0.5, 0.039 with 1.0 and coordinates at 0.15.
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


# For scenes of 64 pixels: an image token for every 16 of them.
SCENES = Size(patch=8, vision_hidden=64)


def make_model(
    folder: Path,
    vocabulary: Vocabulary = "small",
    *,
    tied: bool = True,
    seed: int = 0,
    spread: float = 1.0,
    coords: bool = True,
    ordinal: bool = False,
    size: Size | None = None,
) -> Path:
    """Writes model, tokenizer and processor to `folder`, which must be new or empty.

    `spread` multiplies every weight matrix. At 1 the model is ready to be trained and, untrained, repeats one
    token whatever it sees; at 6 its answers vary and depend on the image, which tests of generation need. Without
    `coords` it is a checkpoint as it is before `coordexp model add-coords`. With `ordinal`, neighbouring
    coordinate tokens start alike, and so do neighbouring places of the picture.
    """
    if not is_free(folder):
        raise FileExistsError(f"{folder} is not an empty folder\n  give another folder, or remove this one")
    size = size or Size()
    tokenizer = make_tokenizer(vocabulary, coords=coords)
    model = _random_model(_config(tokenizer, size, tied), seed, spread)
    if ordinal:
        first = tokenizer.convert_tokens_to_ids(COORD_TOKENS[0])
        start_ordinal(model, range(first, first + len(COORD_TOKENS)), seed, COORD_DEVIATION)
        _start_positions(model, seed)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    _processor(tokenizer, size.patch).save_pretrained(folder)
    return folder


def _config(tokenizer: PreTrainedTokenizerFast, size: Size, tied: bool) -> Qwen3VLConfig:
    head = size.hidden // size.heads
    height = head // 6
    token_id = tokenizer.convert_tokens_to_ids
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [head // 2 - 2 * height, height, height],
        "mrope_interleaved": True,
    }
    return Qwen3VLConfig(
        text_config={
            "vocab_size": math.ceil(len(tokenizer) / 64) * 64,
            "hidden_size": size.hidden,
            "intermediate_size": 2 * size.hidden,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.heads // 2,
            "head_dim": head,
            "rope_parameters": rope,
            "max_position_embeddings": size.max_positions,
            "tie_word_embeddings": tied,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": size.vision_depth,
            "hidden_size": size.vision_hidden,
            "intermediate_size": 2 * size.vision_hidden,
            "num_heads": size.vision_heads,
            "out_hidden_size": size.hidden,
            "patch_size": size.patch,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "deepstack_visual_indexes": [size.vision_depth - 1],
            "num_position_embeddings": 256,
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=tied,
    )


def _random_model(config: Qwen3VLConfig, seed: int, spread: float) -> Qwen3VLForConditionalGeneration:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config).to(torch.float32)
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.mul_(spread)
    return model


def _start_positions(model: Qwen3VLForConditionalGeneration, seed: int) -> None:
    """Row and column of an image patch, as the coordinates have them, so that a place can be read off from the
    first step on."""
    rows = model.model.visual.pos_embed.weight
    side = math.isqrt(len(rows))
    places = torch.arange(side) * (BINS - 1) // (side - 1)
    down, across = (ordinal_rows(rows.shape[1], seed + k)[places] for k in (1, 2))
    with torch.no_grad():
        rows.copy_(((down[:, None] + across[None]) / math.sqrt(2) * POSITION_DEVIATION).flatten(0, 1))


def _processor(tokenizer: PreTrainedTokenizerFast, patch: int) -> Qwen3VLProcessor:
    grid = {"patch_size": patch, "merge_size": MERGE, "temporal_patch_size": 2}
    side = patch * MERGE
    images = Qwen2VLImageProcessor(
        **grid,
        size={"shortest_edge": side * side, "longest_edge": 1024 * 1024},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return Qwen3VLProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**grid),
        chat_template=CHAT_TEMPLATE,
    )
