"""Gives a Qwen3-VL checkpoint the 1,000 coordinate tokens: tokenizer, embeddings, config; the rest is copied.

Works on the files, shard by shard: only the shards that hold an embedding or the output head are read, so a model
of any size needs the memory of its largest shard. New rows are the mean of the old ones with a little
noise or, if `ordinal`, with a part in which neighbouring bins are alike.
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

from coordexp.data import BINS
from coordexp.errors import UserError
from coordexp.folders import is_free
from coordexp.vocab.ordinal import ordinal_rows
from coordexp.vocab.table import COORD_TOKENS, VocabularyError, VocabularyTable

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
ROWS_ARE_A_MULTIPLE_OF = 64


class ExpansionError(UserError, ValueError):
    pass


def add_coord_tokens(
    source: Path, target: Path, *, noise: float = 0.02, ordinal: bool = False, seed: int = 0
) -> int:
    """Writes the expanded checkpoint to `target`, a new folder, and says how many tokens were added."""
    if not is_free(target):
        raise ExpansionError(f"{target} exists and is not an empty folder\n  give another one, or remove it")
    config = _read_json(source / "config.json")
    shards = _shards(source)
    tokenizer, missing = _tokenizer(source)
    used, rows = tokenizer.get_vocab_size(with_added_tokens=True), _rows(config)
    if not missing and rows < used:
        raise ExpansionError(
            f"{source} has coordinate tokens but only {rows} rows for {used} tokens: it is damaged"
        )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in missing])
    try:
        table = VocabularyTable.from_tokenizer(tokenizer)
    except VocabularyError as error:
        raise ExpansionError(str(error)) from error
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


def _shards(source: Path) -> list[Path]:
    shards = sorted(source.glob("*.safetensors"))
    if not shards:
        raise ExpansionError(
            f"{source} has no *.safetensors\n  save the model with safetensors; pickles are not read"
        )
    if not any(_expandable(shard) for shard in shards):
        raise ExpansionError(
            f"{source} has no weight named ...{EMBEDDING}\n  give the folder of a whole Qwen3-VL model"
        )
    return shards


def _tokenizer(source: Path) -> tuple[Tokenizer, list[str]]:
    """The tokenizer, and the coordinate tokens that it lacks: all of them or none."""
    file = source / "tokenizer.json"
    if not file.is_file():
        raise ExpansionError(f"{file}: no such file\n  save the tokenizer in its fast form there")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ExpansionError(f"{file} is not a tokenizer: {error}") from error
    missing = [token for token in COORD_TOKENS if tokenizer.token_to_id(token) is None]
    if missing and len(missing) < BINS:
        has = BINS - len(missing)
        raise ExpansionError(f"{source} has {has} of the {BINS} coordinate tokens\n  start from one with none")
    return tokenizer, missing


def _expandable(shard: Path) -> list[str]:
    """The weights of a shard that have a row for every token."""
    try:
        with safe_open(shard, "pt") as opened:
            names = list(opened.keys())
    except SafetensorError as error:
        raise ExpansionError(f"{shard} cannot be read: {error}\n  copy the checkpoint again") from error
    return [name for name in names if name.endswith((EMBEDDING, HEAD)) and "visual" not in name]


def _expand_shard(shard: Path, target: Path, used: int, rows: int, start: tuple[float, bool], seed: int) -> None:
    """A copy in which the embedding and the head, where the shard has them, end in fresh rows. The noise is the
    same for both, so that a head stored beside the embedding it is tied to stays equal to it."""
    names = _expandable(shard)
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
    index = target / "model.safetensors.index.json"
    if index.is_file():
        content = _read_json(index)
        total = sum(_tensor_bytes(target / name) for name in set(content["weight_map"].values()))
        content.setdefault("metadata", {})["total_size"] = total
        _write_json(index, content)


def _tensor_bytes(shard: Path) -> int:
    """The file without its header, whose length its first eight bytes give."""
    with shard.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    return shard.stat().st_size - 8 - header


def _rows(config: dict[str, Any]) -> int:
    text = config.get("text_config", config)
    if "vocab_size" not in text:
        raise ExpansionError("config.json names no vocab_size\n  give the folder of a Qwen3-VL model")
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
        raise ExpansionError(f"{file}: no such file\n  give the folder of a Hugging Face model")
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ExpansionError(f"{file} is not JSON: {error}") from error
    return content


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
