"""Adds the 1,000 coordinate tokens to a checkpoint: to its tokenizer, embeddings and config.

It works on the files, shard by shard. Only shards with an embedding or the output head are loaded, so the memory
of the largest shard is enough for a model of any size. All other files are copied. New rows are the mean of the
old rows plus a little noise or, with `ordinal`, plus a part that is similar for neighbouring bins.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from coordexp.answers.table import COORD_TOKENS, VocabularyError, VocabularyTable, read_tokenizer
from coordexp.data import BINS
from coordexp.errors import explain
from coordexp.files import is_free, json_object

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
ROWS_ARE_A_MULTIPLE_OF = 64

# Periods per side of the image. Low ones separate bins that are far apart, high ones separate neighbours.
_FREQUENCIES = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def add_coord_tokens(
    source: Path, target: Path, *, noise: float = 0.02, ordinal: bool = False, seed: int = 0
) -> int:
    """Write the expanded checkpoint to `target`, a new folder, and return the number of added tokens."""
    if not is_free(target):
        raise VocabularyError(f"{target} exists and is not an empty folder", "give another one, or remove it")
    config = _read_json(source / "config.json")
    shards = _shards(source)
    tokenizer = read_tokenizer(source)
    missing = _missing_coord_tokens(tokenizer, source)
    used, rows = tokenizer.get_vocab_size(with_added_tokens=True), _rows(config, source)
    if not missing and rows < used:
        problem = f"{source} has coordinate tokens but only {rows} rows for {used} tokens: it is damaged"
        raise VocabularyError(problem, "start from the original checkpoint")
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in missing])
    table = VocabularyTable.from_tokenizer(tokenizer, str(source))
    needed = math.ceil(len(table.pieces) / ROWS_ARE_A_MULTIPLE_OF) * ROWS_ARE_A_MULTIPLE_OF
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _copy_other_files(source, partial)
    if missing:
        tokenizer.save(str(partial / "tokenizer.json"))
        _write_json(partial / "config.json", _with_rows(config, max(rows, needed)))
    for shard in shards:
        if missing:
            _expand_shard(shard, partial / shard.name, used, max(rows, needed), (noise, ordinal), seed)
        else:
            shutil.copyfile(shard, partial / shard.name)
    if missing:
        _correct_index(partial)
    if target.exists():
        target.rmdir()
    partial.rename(target)
    return len(missing)


def ordinal_rows(width: int, seed: int) -> Tensor:
    """Return one row per bin, [1000, width], with mean 0 and standard deviation 1. Neighbouring bins are similar.

    A row has the sines and cosines of the bin in random directions. High frequencies weigh less, so that the
    similarity of two rows falls with the distance of their bins.
    """
    generator = torch.Generator().manual_seed(seed)
    angles = torch.arange(BINS) / BINS * 2 * math.pi
    frequencies = torch.tensor(_FREQUENCIES)
    waves = torch.cat((torch.sin(angles[:, None] * frequencies), torch.cos(angles[:, None] * frequencies)), dim=1)
    waves = waves / (1 + frequencies.repeat(2)).sqrt()
    rows = waves @ torch.randn(waves.shape[1], width, generator=generator)
    return (rows - rows.mean(0)) / rows.std()


def _shards(source: Path) -> list[Path]:
    shards = sorted(source.glob("*.safetensors"))
    if not shards:
        raise VocabularyError(
            f"{source} has no *.safetensors", "save the model with safetensors; pickles are not read"
        )
    if not any(_expandable_weights(shard) for shard in shards):
        raise VocabularyError(f"{source} has no weight named ...{EMBEDDING}", "give the folder of a whole model")
    return shards


def _missing_coord_tokens(tokenizer: Tokenizer, source: Path) -> list[str]:
    """Return the coordinate tokens that the tokenizer lacks: all of them or none. Raise if it lacks only some."""
    missing = [token for token in COORD_TOKENS if tokenizer.token_to_id(token) is None]
    if missing and len(missing) < BINS:
        problem = f"{source} has {BINS - len(missing)} of the {BINS} coordinate tokens"
        raise VocabularyError(problem, "start from a checkpoint without coordinate tokens")
    return missing


def _expandable_weights(shard: Path) -> list[str]:
    """Return the names of the weights in a shard that have a row for every token."""
    with (
        explain(SafetensorError, f"{shard} cannot be read", "copy the checkpoint again", to=VocabularyError),
        safe_open(shard, "pt") as opened,
    ):
        names = list(opened.keys())
    return [name for name in names if name.endswith((EMBEDDING, HEAD)) and "visual" not in name]


def _expand_shard(shard: Path, target: Path, used: int, rows: int, start: tuple[float, bool], seed: int) -> None:
    """Copy a shard and append new rows to its embedding and head, if it has them.

    Both get the same noise, so that a head that is stored beside the embedding it is tied to stays equal to it.
    """
    names = _expandable_weights(shard)
    if not names:
        shutil.copyfile(shard, target)
        return
    with safe_open(shard, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(shard)
    for name in names:
        old = tensors[name]
        known = old[:used].float()
        noise, ordinal = start
        fresh = noise * torch.randn((rows - used, old.shape[1]), generator=torch.Generator().manual_seed(seed))
        if ordinal:
            fresh[:BINS] += ordinal_rows(old.shape[1], seed)
        mean, spread = known.mean(dim=0), known.std()
        tensors[name] = torch.cat([old[:used], (mean + spread * fresh).to(old.dtype)]).contiguous()
    save_file(tensors, target, metadata=metadata)


def _copy_other_files(source: Path, target: Path) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copyfile(file, target / file.name)


def _correct_index(target: Path) -> None:
    """Write the new total size into the index of a sharded checkpoint."""
    index = target / "model.safetensors.index.json"
    if index.is_file():
        content = _read_json(index)
        total = sum(_tensor_bytes(target / name) for name in set(content["weight_map"].values()))
        content.setdefault("metadata", {})["total_size"] = total
        _write_json(index, content)


def _tensor_bytes(shard: Path) -> int:
    """Return the size of a file without its header, whose length is in the first eight bytes."""
    with shard.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    return shard.stat().st_size - 8 - header


def _rows(config: dict[str, Any], source: Path) -> int:
    text = config.get("text_config", config)
    if "vocab_size" not in text:
        problem = f"{source / 'config.json'} has no vocab_size"
        raise VocabularyError(problem, "give the folder of a vision-language model")
    return int(text["vocab_size"])


def _with_rows(config: dict[str, Any], rows: int) -> dict[str, Any]:
    config = {**config}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], "vocab_size": rows}
    if "vocab_size" in config or "text_config" not in config:
        config["vocab_size"] = rows
    return config


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise VocabularyError(f"{file}: no such file", "give the folder of a Hugging Face model")
    return json_object(file.read_bytes(), str(file))


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
