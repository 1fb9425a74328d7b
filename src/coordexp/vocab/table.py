"""A table over all ids of a byte-level BPE tokenizer, made once: the bytes of each id, and its meaning.

The parser reads a rollout through `symbols`: one string per id in which every character stands for one byte
(as in Latin-1), except that a coordinate token is the single character `coord_symbol(bin)`, a stop token is
STOP, an image or video placeholder is PLACEHOLDER, and an id without any text is UNKNOWN. No byte can be
mistaken for one of these, and the text of an answer is the concatenation of its symbols.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from coordexp.data import BINS
from coordexp.errors import UserError

COORD_TOKENS = tuple(f"<|coord_{bin}|>" for bin in range(BINS))
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")
PLACEHOLDER_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")

COORD_BASE = 0x1000
STOP = "\u2000"
PLACEHOLDER = "\u2001"
UNKNOWN = "\u2002"


_COORD_RUNS = re.compile(rb"(<\|coord_(?:0|[1-9][0-9]{0,2})\|>)")


class VocabularyError(UserError, ValueError):
    pass


@dataclass(frozen=True)
class VocabularyTable:
    pieces: tuple[bytes, ...]  # the bytes of each id; b"" for an id that has none
    symbols: tuple[str, ...]
    first_coord: int
    end_of_turn: int
    reserved: tuple[str, ...]  # texts that the tokenizer would turn into a coordinate, stop or special token
    tokenizer: Tokenizer = field(repr=False, compare=False)
    byte_ids: tuple[int, ...] = field(repr=False)

    @classmethod
    def from_folder(cls, folder: Path | str) -> "VocabularyTable":
        """The table of a saved model or tokenizer."""
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise VocabularyError(f"{file}: no such file; save the tokenizer in its fast form there")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers has no narrower one
            raise VocabularyError(f"{file}: not a saved tokenizer ({error})") from error
        try:
            return cls.from_tokenizer(tokenizer)
        except VocabularyError as error:
            raise VocabularyError(f"{folder}: {error}") from None

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "VocabularyTable":
        pieces = _pieces(tokenizer)
        first_coord = _first_coord(tokenizer)
        symbols = [piece.decode("latin-1") or UNKNOWN for piece in pieces]
        for bin in range(BINS):
            symbols[first_coord + bin] = coord_symbol(bin)
        for names, symbol in ((STOP_TOKENS, STOP), (PLACEHOLDER_TOKENS, PLACEHOLDER)):
            for name in names:
                if (id := tokenizer.token_to_id(name)) is not None:
                    symbols[id] = symbol
        end_of_turn = tokenizer.token_to_id("<|im_end|>")
        if end_of_turn is None:
            raise VocabularyError("the tokenizer has no <|im_end|> token, which ends a turn")
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        reserved = sorted({*COORD_TOKENS, *STOP_TOKENS, *PLACEHOLDER_TOKENS, *special}, key=len, reverse=True)
        table = {piece: id for id, piece in enumerate(pieces) if len(piece) == 1}
        missing = [byte for byte in range(256) if bytes([byte]) not in table]
        if missing:
            raise VocabularyError(f"no token for the byte {missing[0]:#x}: not a byte-level BPE tokenizer")
        byte_ids = tuple(table[bytes([byte])] for byte in range(256))
        return cls(pieces, tuple(symbols), first_coord, end_of_turn, tuple(reserved), tokenizer, byte_ids)

    def is_coord(self, id: int) -> bool:
        return 0 <= id - self.first_coord < BINS

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        return b"".join([self.pieces[id] for id in ids])

    def text_of(self, ids: Sequence[int]) -> str:
        """For people: ids that no token has are left out, bytes that are no text are replaced."""
        if max(ids, default=0) >= len(self.pieces):
            ids = [id for id in ids if id < len(self.pieces)]
        return self.bytes_of(ids).decode(errors="replace")

    def encode(self, text: bytes) -> list[int]:
        """Ids whose bytes are exactly `text`: the tokenizer's own where it keeps every byte, else byte by byte.

        Only a piece cut out of a character, or text that is not NFC, ever needs the second way.
        """
        start = 0
        while start < len(text) and 0x80 <= text[start] < 0xC0:  # the rest of a character cut in two
            start += 1
        head = [self.byte_ids[byte] for byte in text[:start]]
        try:
            ids = self.tokenizer.encode(text[start:].decode("utf-8"), add_special_tokens=False).ids
        except UnicodeDecodeError:
            ids = []
        if self.bytes_of(ids) != text[start:]:
            ids = [id for run in _COORD_RUNS.split(text[start:]) for id in self._spelled(run)]
        return head + ids

    def _spelled(self, run: bytes) -> list[int]:
        """A coordinate as its token, everything else byte by byte."""
        if match := _COORD_RUNS.fullmatch(run):
            return [self.first_coord + int(match.group()[8:-2])]
        return [self.byte_ids[byte] for byte in run]


def coord_symbol(bin: int) -> str:
    return chr(COORD_BASE + bin)


def normal_form(text: str) -> str:
    """As Qwen's tokenizer normalises text before it splits it."""
    return unicodedata.normalize("NFC", text)


def _pieces(tokenizer: Tokenizer) -> tuple[bytes, ...]:
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
            raise VocabularyError(f"token {token!r} has {unknown[0]!r}: not a byte-level BPE vocabulary")
        pieces[id] = bytes([decode[character] for character in token])
    return tuple(pieces)


def _byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself where it can be seen, else from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(shifted)) for byte in range(256)]


def _first_coord(tokenizer: Tokenizer) -> int:
    ids = [tokenizer.token_to_id(token) for token in COORD_TOKENS]
    missing = [token for token, id in zip(COORD_TOKENS, ids, strict=True) if id is None]
    if missing:
        raise VocabularyError(
            f"{len(missing)} of the {BINS} coordinate tokens are missing, first {missing[0]}\n"
            "  add them with: coordexp model add-coords --model DIR --out DIR"
        )
    first = ids[0]
    assert first is not None
    if ids != list(range(first, first + BINS)):
        wrong = next(bin for bin, id in enumerate(ids) if id != first + bin)
        raise VocabularyError(
            f"coordinate tokens must have consecutive ids in order; {COORD_TOKENS[wrong]} has {ids[wrong]}, "
            f"and <|coord_0|> has {first}\n  expand the original checkpoint with: coordexp model add-coords"
        )
    return first
