"""Gives a Qwen3-VL checkpoint the 1,000 coordinate tokens: tokenizer, embeddings, config; the rest is copied.

Works on the files, shard by shard: only the shards that hold an embedding or the output head are read, so a model
of any size needs the memory of its largest shard. New rows are the mean of the old ones with a little noise.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from coordexp.data import BINS
from coordexp.vocab.table import COORD_TOKENS, VocabularyError, VocabularyTable

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
ROWS_ARE_A_MULTIPLE_OF = 64


class ExpansionError(ValueError):
    pass


def add_coord_tokens(source: Path, target: Path, *, noise: float = 0.02, seed: int = 0) -> int:
    """Writes the expanded checkpoint to `target`, a new folder, and says how many tokens were added."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExpansionError(f"{target} exists and is not an empty folder\n  give another one, or remove it")
    config = _read_json(source / "config.json")
    tokenizer_file = source / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ExpansionError(f"{tokenizer_file}: no such file\n  save the tokenizer in its fast form there")
    shards = sorted(source.glob("*.safetensors"))
    if not shards:
        raise ExpansionError(
            f"{source} has no *.safetensors\n  save the model with safetensors; pickles are not read"
        )
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    before = tokenizer.get_vocab_size(with_added_tokens=True)
    missing = [token for token in COORD_TOKENS if tokenizer.token_to_id(token) is None]
    if missing and len(missing) < BINS:
        raise ExpansionError(
            f"{source} has {BINS - len(missing)} of the {BINS} coordinate tokens\n  start from one with none"
        )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in missing])
    try:
        table = VocabularyTable.from_tokenizer(tokenizer)
    except VocabularyError as error:
        raise ExpansionError(str(error)) from error
    rows = max(_rows(config), math.ceil(len(table.pieces) / ROWS_ARE_A_MULTIPLE_OF) * ROWS_ARE_A_MULTIPLE_OF)
    target.mkdir(parents=True, exist_ok=True)
    _copy_other_files(source, target)
    if not missing:
        for shard in shards:
            shutil.copy2(shard, target / shard.name)
        return 0
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(target / "config.json", _with_rows(config, rows))
    generator = torch.Generator().manual_seed(seed)
    for shard in shards:
        _expand_shard(shard, target / shard.name, before, rows, noise, generator)
    _correct_index(target)
    return len(missing)


def _expand_shard(
    shard: Path, target: Path, used: int, rows: int, noise: float, generator: torch.Generator
) -> None:
    """A copy in which the embedding and the head, where the shard has them, end in fresh rows."""
    with safe_open(shard, "pt") as opened:
        names = [name for name in opened.keys() if name.endswith((EMBEDDING, HEAD)) and "visual" not in name]  # noqa: SIM118
        metadata = opened.metadata()
    if not names:
        shutil.copy2(shard, target)
        return
    tensors = load_file(shard)
    for name in names:
        old = tensors[name]
        known = old[:used].float()
        fresh = torch.randn((rows - used, old.shape[1]), generator=generator)
        mean, spread = known.mean(dim=0), known.std()
        tensors[name] = torch.cat([old[:used], (mean + noise * spread * fresh).to(old.dtype)]).contiguous()
    save_file(tensors, target, metadata=metadata)


def _copy_other_files(source: Path, target: Path) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy2(file, target / file.name)


def _correct_index(target: Path) -> None:
    index = target / "model.safetensors.index.json"
    if index.is_file():
        content = _read_json(index)
        total = sum((target / name).stat().st_size for name in set(content["weight_map"].values()))
        content.setdefault("metadata", {})["total_size"] = total
        _write_json(index, content)


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
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
