"""A table of all ids of a byte-level BPE tokenizer: the bytes of each id, and its meaning.

The parser reads a rollout through `symbols`, which has one string per id. Each character of the string stands for
one byte, as in Latin-1. A coordinate token is the single character `coord_symbol(bin)`, a stop token is STOP, an
image or video placeholder is PLACEHOLDER, and an id without text is UNKNOWN. These characters differ from all
bytes, and the text of an answer is the concatenation of its symbols. A tokenizer without coordinate tokens has a
table too, for answers in the model's own format.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from coordexp.data import BINS
from coordexp.errors import DataError, explain
from coordexp.families import PLACEHOLDER_TOKENS, STOP_TOKENS

COORD_TOKENS = tuple(f"<|coord_{bin}|>" for bin in range(BINS))

COORD_BASE = 0x1000
STOP = "\u2000"
PLACEHOLDER = "\u2001"
UNKNOWN = "\u2002"

USE_QWEN = "use the tokenizer of a Qwen model"

MOST_RUNS = 50_000  # remembered by `encode`

_COORD_RUNS = re.compile(rb"(<\|coord_(?:0|[1-9][0-9]{0,2})\|>)")


class VocabularyError(DataError):
    """A tokenizer, or the checkpoint that it belongs to, cannot be used or cannot be expanded."""


@dataclass(frozen=True)
class VocabularyTable:
    pieces: tuple[bytes, ...]  # the bytes of each id; b"" for an id without text
    symbols: tuple[str, ...]
    coord_start: int | None  # the id of bin 0; None without coordinate tokens
    end_of_turn: int
    reserved: tuple[str, ...]  # texts that the tokenizer turns into a coordinate, stop or special token
    tokenizer: Tokenizer = field(repr=False, compare=False)
    byte_ids: tuple[int, ...] = field(repr=False)
    _runs: dict[bytes, list[int]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_folder(cls, folder: Path | str, *, needs_coords: bool = True) -> "VocabularyTable":
        """Return the table of a saved model or tokenizer. Raise VocabularyError if it has no coordinate tokens and
        `needs_coords` is set."""
        return cls.from_tokenizer(read_tokenizer(Path(folder)), str(folder), needs_coords=needs_coords)

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Tokenizer, source: str = "the tokenizer", *, needs_coords: bool = True
    ) -> "VocabularyTable":
        """Return the table of a tokenizer. Messages name it as `source`."""
        pieces = _pieces(tokenizer, source)
        coord_start = _coord_start(tokenizer, source)
        if coord_start is None and needs_coords:
            raise _no_coord_tokens(source)
        symbols = [piece.decode("latin-1") or UNKNOWN for piece in pieces]
        if coord_start is not None:
            for bin in range(BINS):
                symbols[coord_start + bin] = coord_symbol(bin)
        for names, symbol in ((STOP_TOKENS, STOP), (PLACEHOLDER_TOKENS, PLACEHOLDER)):
            for name in names:
                if (id := tokenizer.token_to_id(name)) is not None:
                    symbols[id] = symbol
        end_of_turn = tokenizer.token_to_id(STOP_TOKENS[0])
        if end_of_turn is None:
            raise VocabularyError(f"{source}: the token {STOP_TOKENS[0]}, which ends a turn, is missing", USE_QWEN)
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        coords = () if coord_start is None else COORD_TOKENS
        reserved = sorted({*coords, *STOP_TOKENS, *PLACEHOLDER_TOKENS, *special}, key=len, reverse=True)
        ids = {piece: id for id, piece in enumerate(pieces) if len(piece) == 1}
        missing = [byte for byte in range(256) if bytes([byte]) not in ids]
        if missing:
            problem = f"{source}: no token for the byte {missing[0]:#x}, so it is not a byte-level BPE tokenizer"
            raise VocabularyError(problem, USE_QWEN)
        byte_ids = tuple(ids[bytes([byte])] for byte in range(256))
        return cls(pieces, tuple(symbols), coord_start, end_of_turn, tuple(reserved), tokenizer, byte_ids)

    @property
    def first_coord(self) -> int:
        """Return the id of bin 0. Raise VocabularyError if the tokenizer has no coordinate tokens."""
        if self.coord_start is None:
            raise _no_coord_tokens("the tokenizer")
        return self.coord_start

    @cached_property
    def reserved_starts(self) -> frozenset[str]:
        """Return the first characters of the reserved texts. Text without them contains no reserved text."""
        return frozenset(text[0] for text in self.reserved)

    def is_coord(self, id: int) -> bool:
        return self.coord_start is not None and 0 <= id - self.coord_start < BINS

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        return b"".join([self.pieces[id] for id in ids])

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, for display. Unknown ids are left out, and invalid bytes are replaced."""
        if max(ids, default=0) >= len(self.pieces):
            ids = [id for id in ids if id < len(self.pieces)]
        return self.bytes_of(ids).decode(errors="replace")

    def encode(self, text: bytes) -> list[int]:
        """Return ids whose bytes are exactly `text`.

        They are the tokenizer's own ids if these keep every byte. Otherwise, for a part of a character or for text
        that is not NFC, the text between two coordinates is encoded byte by byte.
        """
        if self.coord_start is None:
            return self.encode_text(text)
        ids: list[int] = []
        for k, run in enumerate(_COORD_RUNS.split(text)):
            if k % 2:
                ids.append(self.first_coord + int(run[8:-2]))
            elif run:
                ids += self._encode_run(run)
        return ids

    def _encode_run(self, run: bytes) -> list[int]:
        """Return the ids of text without coordinates. A tokenizer encodes the text on both sides of a special
        token independently. Answers repeat the same few runs, so their ids are remembered."""
        ids = self._runs.get(run)
        if ids is None:
            ids = self.encode_text(run)
            if len(self._runs) >= MOST_RUNS:
                self._runs.clear()
            self._runs[run] = ids
        return ids

    def encode_text(self, text: bytes) -> list[int]:
        """Return ids whose bytes are exactly `text`, which has no coordinate tokens. They are not remembered."""
        start = 0
        while start < len(text) and 0x80 <= text[start] < 0xC0:  # the end of a character that was cut in two
            start += 1
        rest = text[start:]
        ids: list[int] = self.tokenizer.encode(rest.decode(errors="replace"), add_special_tokens=False).ids
        if self.bytes_of(ids) != rest:
            ids = [self.byte_ids[byte] for byte in rest]
        return [self.byte_ids[byte] for byte in text[:start]] + ids


def coord_symbol(bin: int) -> str:
    return chr(COORD_BASE + bin)


def normal_form(text: str) -> str:
    """Return the text as Qwen's tokenizer normalises it before splitting it."""
    return unicodedata.normalize("NFC", text)


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a saved model or tokenizer."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise VocabularyError(f"{file}: no such file", "save the tokenizer in its fast form there")
    # tokenizers raises nothing narrower than Exception.
    with explain(Exception, f"{file} is not a saved tokenizer", "copy the file again", to=VocabularyError):
        return Tokenizer.from_file(str(file))


def _pieces(tokenizer: Tokenizer, source: str) -> tuple[bytes, ...]:
    decode = {character: byte for byte, character in enumerate(_byte_characters())}
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values()) + 1)
    for token, id in vocabulary.items():
        if id in added:
            pieces[id] = added[id].content.encode()
            continue
        unknown = [character for character in token if character not in decode]
        if unknown:
            problem = f"{source}: the token {token!r} has {unknown[0]!r}, so it is not byte-level BPE"
            raise VocabularyError(problem, USE_QWEN)
        pieces[id] = bytes([decode[character] for character in token])
    return tuple(pieces)


def _byte_characters() -> list[str]:
    """Return the character that byte-level BPE writes for each byte: itself if visible, else from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(shifted)) for byte in range(256)]


def _no_coord_tokens(source: str, missing: Sequence[str] = COORD_TOKENS) -> VocabularyError:
    return VocabularyError(
        f"{source}: {len(missing)} of the {BINS} coordinate tokens are missing, first {missing[0]}",
        f"add them with: coordexp model add-coords --model {source} --out DIR, or use the format that needs none: "
        "custom.answer_format: native, and coordexp predict --answer-format native",
    )


def _coord_start(tokenizer: Tokenizer, source: str) -> int | None:
    """Return the id of bin 0, or None if there are no coordinate tokens. Raise VocabularyError if only some are
    there."""
    ids = [tokenizer.token_to_id(token) for token in COORD_TOKENS]
    missing = [token for token, id in zip(COORD_TOKENS, ids, strict=True) if id is None]
    if len(missing) == BINS:
        return None
    if missing:
        raise _no_coord_tokens(source, missing)
    first = ids[0]
    assert first is not None
    if ids != list(range(first, first + BINS)):
        wrong = next(bin for bin, id in enumerate(ids) if id != first + bin)
        raise VocabularyError(
            f"{source}: coordinate tokens must have consecutive ids in order; {COORD_TOKENS[wrong]} has "
            f"{ids[wrong]}, and <|coord_0|> has {first}",
            "expand the original checkpoint with: coordexp model add-coords",
        )
    return first
