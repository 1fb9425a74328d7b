"""Vocabularies for tests: that of Qwen, the small trained one, and some with random merges."""

import functools
import hashlib
import importlib.util
import os
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from coordexp.answers.table import COORD_TOKENS, VocabularyTable

SAMPLE = (
    '{"object_1": {"desc": "red cup", "bbox_2d": ["", ""]}, "object_20": {"poly": ["", "", ""], "desc": "a \\" '
    '\\u00e9 猫 🙂 é"}}, {} ]}, }}" "]}} {"object_3": 5, [[]] true null -1.5e3 \n\t  object_007'
)


@functools.cache
def table(name: str) -> VocabularyTable:
    """Return the vocabulary `small`, `qwen`, or `random-N` with the seed N."""
    if name.startswith("random-"):
        return VocabularyTable.from_tokenizer(_random_tokenizer(int(name.partition("-")[2])))
    return VocabularyTable.from_tokenizer(_tokenizer(name))


def _tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer of the demo model, from disk if it was built before: that of Qwen takes ten seconds."""
    path = _cached(name)
    if path.exists():
        return Tokenizer.from_file(str(path))
    from coordexp.demo.model import make_tokenizer

    tokenizer = make_tokenizer(name).backend_tokenizer
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")  # several processes may build it at once
    tokenizer.save(str(partial))
    partial.replace(path)
    return tokenizer


@functools.cache
def _cached(name: str) -> Path:
    """Return the file of a tokenizer. Its name changes with the code that builds it and with Qwen's ranks."""
    builder, ranks = (importlib.util.find_spec(module) for module in ("coordexp.demo.model", "dashscope"))
    files = Path(builder.origin), Path(ranks.submodule_search_locations[0]) / "resources/qwen.tiktoken"
    key = hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "coordexp/tokenizers" / f"{name}-{key}.json"


def encode(text: str, vocabulary: VocabularyTable) -> list[int]:
    return vocabulary.tokenizer.encode(text, add_special_tokens=False).ids


def _random_tokenizer(seed: int) -> Tokenizer:
    """Return a tokenizer with all bytes and with random merges from an answer.

    The merges cross quotes, braces, letters and parts of characters.
    """
    chooser = random.Random(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(SAMPLE)
    text = "".join(word for word, _ in words)
    vocabulary = {character: id for id, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    pieces = list(text)
    for _ in range(chooser.randint(5, 120)):
        at = chooser.randrange(len(pieces) - 1)
        left, right = pieces[at], pieces[at + 1]
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
        merged: list[str] = []
        for piece in pieces:
            if merged and merged[-1] == left and piece == right:
                merged[-1] = left + right
            else:
                merged.append(piece)
        pieces = merged
        if len(pieces) < 2:
            break
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in COORD_TOKENS])
    return tokenizer
