"""The training sequence of a sample: its streams, the roles and kinds of tokens, and how objects are written.

Objects are written as `"object_1": {"desc": "red cup", "bbox_2d": ["<|coord_10|>", ...]}`. Separators are `, ` and
`: `, coordinates are quoted, so that the text is plain JSON, and `poly` is one flat list.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from coordexp.answers.entries import Span
from coordexp.answers.table import VocabularyTable, normal_form
from coordexp.data import BINS, Geometry, TrueObject
from coordexp.families import PLACE_TOKENS

FieldOrder = Literal["desc_first", "geometry_first"]


class Role(IntEnum):
    """The purpose of a token in a segment. Roles from `matched_coord` (2) upwards are supervised."""

    prompt = 0
    masked_prefix = 1
    matched_coord = 2
    tail_structure = 3
    tail_desc = 4
    tail_coord = 5
    end_of_turn = 6
    answer = 9  # the answer of a chat record with its end of turn; 7 and 8 are roles that only the inspector has


class TokenKind(IntEnum):
    """The content of a token of the answer, whether it is supervised or not. Loss terms are divided by the
    number of tokens of their kinds, so that a single missed object weighs the same however many others were
    found."""

    none = 0
    structure = 1
    desc = 2
    coord = 3
    end_of_turn = 4
    answer = 5  # of a chat record, with its end of turn


@dataclass(frozen=True, eq=False)
class Segment:
    """A training sequence: arrays with one value per token.

    `coord_targets` is NaN where no coordinate is supervised, and `weights` is 0 where nothing is. `sides` is 1
    to 4 at x1, y1, x2, y2 of a supervised box, and 0 elsewhere.
    """

    ids: NDArray[np.int64]
    roles: NDArray[np.int8]
    kinds: NDArray[np.int8]
    sides: NDArray[np.int8]
    coord_targets: NDArray[np.float32]
    weights: NDArray[np.float32]
    prompt_length: int

    def __len__(self) -> int:
        return len(self.ids)


def build_chat_segment(prompt_ids: Sequence[int], answer: str, table: VocabularyTable) -> Segment:
    """Return the segment of a chat record: all tokens of the answer and the end of turn are supervised. Raise
    ValueError if the answer has a token that is not text."""
    if reserved := find_reserved(answer, table):
        raise ValueError(f"the answer contains {reserved}, which is not text for this model")
    tail = [*table.encode(normal_form(answer).encode()), table.end_of_turn]
    ids = np.array([*prompt_ids, *tail], dtype=np.int64)
    start = len(prompt_ids)
    roles = np.zeros(len(ids), dtype=np.int8)
    kinds = np.zeros(len(ids), dtype=np.int8)
    roles[start:], kinds[start:] = Role.answer, TokenKind.answer
    return make_plain_segment(ids, roles, kinds, start)


def make_plain_segment(
    ids: NDArray[np.int64], roles: NDArray[np.int8], kinds: NDArray[np.int8], prompt_length: int
) -> Segment:
    """Return a segment without coordinate tokens, in which all supervised tokens have the weight 1."""
    return Segment(
        ids,
        roles,
        kinds,
        sides=np.zeros(len(ids), dtype=np.int8),
        coord_targets=np.full(len(ids), np.nan, dtype=np.float32),
        weights=(roles > Role.masked_prefix).astype(np.float32),
        prompt_length=prompt_length,
    )


def find_reserved(text: str, table: VocabularyTable) -> str | None:
    """Return a token in the text that ends a turn, stands for an image, or the like. Tokens that mark a place in
    an image are part of an answer."""
    if table.reserved_starts.isdisjoint(text):
        return None
    tokens = (token for token in table.reserved if not token.startswith(PLACE_TOKENS))
    return next((token for token in tokens if token in text), None)


SUPERVISED_ROLE = np.zeros(len(TokenKind), dtype=np.int8)
SUPERVISED_ROLE[[TokenKind.structure, TokenKind.desc, TokenKind.coord]] = [
    Role.tail_structure,
    Role.tail_desc,
    Role.tail_coord,
]


def token_ends(ids: Sequence[int], texts: Sequence[str] | Sequence[bytes]) -> NDArray[np.int64]:
    """Return the position at which each token ends in the joined text."""
    return np.cumsum([len(texts[id]) for id in ids], dtype=np.int64)


def token_kinds(
    ids: NDArray[np.int64], ends: NDArray[np.int64], desc_spans: Sequence[Span], table: VocabularyTable
) -> NDArray[np.int8]:
    """Return the kind of each token. Coordinates are recognised by their ids. A token is desc if it lies entirely
    inside a desc value. Everything else is structure."""
    kinds = np.full(len(ids), TokenKind.structure, dtype=np.int8)
    kinds[tokens_inside(ends, desc_spans)] = TokenKind.desc
    first = table.first_coord
    kinds[(ids >= first) & (ids < first + BINS)] = TokenKind.coord
    return kinds


def tokens_inside(ends: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return which tokens lie entirely inside one of the spans, which are in order. `ends` are the positions at
    which the tokens end."""
    if not spans:
        return np.zeros(len(ends), dtype=np.bool_)
    bounds = np.array(spans, dtype=np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    nearest = np.searchsorted(bounds[:, 0], starts, side="right") - 1
    inside: NDArray[np.bool_] = (nearest >= 0) & (starts < ends) & (ends <= bounds[nearest, 1])
    return inside


class NamedShape(Protocol):
    """What is written of an object: a true one, or one of a corrected answer."""

    @property
    def desc(self) -> str: ...
    @property
    def geometry(self) -> Geometry: ...


@dataclass(frozen=True)
class Fragment:
    """Text that continues an answer. `desc_spans` are the positions of its desc values, and `ends` the positions
    after each of its objects."""

    text: bytes
    desc_spans: tuple[Span, ...]
    ends: tuple[int, ...]


def serialise(
    objects: Sequence[NamedShape], *, after: bytes, first_number: int, order: FieldOrder, table: VocabularyTable
) -> Fragment:
    """Write `objects` as the continuation of the text `after`, and close the answer. Keys are numbered from
    `first_number`."""
    last = after.rstrip(b" \t\n\r")[-1:]
    if last not in (b"{", b"}", b","):
        raise ValueError(f"the prefix ends in {last!r}; an answer can be continued only after '{{', ',' or '}}'")
    text = bytearray()
    spans: list[Span] = []
    ends: list[int] = []
    for offset, true in enumerate(objects):
        if offset or last == b"}":
            text += b", "
        desc = f'"desc": "{escape_desc(true.desc, table)}"'.encode()
        coords = ", ".join([f'"<|coord_{bin}|>"' for bin in true.geometry.bins])
        geometry = f'"{true.geometry.kind}": [{coords}]'.encode()
        text += f'"object_{first_number + offset}": {{'.encode()
        text += b"" if order == "desc_first" else geometry + b", "
        spans.append((len(text) + len(b'"desc": "'), len(text) + len(desc) - 1))
        text += desc + (b", " + geometry if order == "desc_first" else b"") + b"}"
        ends.append(len(text))
    return Fragment(bytes(text + b"}"), tuple(spans), tuple(ends))


def count_answer_tokens(
    answer: Sequence[TrueObject] | str, table: VocabularyTable, order: FieldOrder = "desc_first"
) -> int:
    """Return the number of tokens of the ground-truth answer with these objects, or of the answer to a question,
    including the end of turn."""
    if isinstance(answer, str):
        return len(table.encode(normal_form(answer).encode())) + 1
    text = serialise(answer, after=b"{", first_number=1, order=order, table=table).text
    return len(table.encode(b"{" + text)) + 1


def escape_desc(desc: str, table: VocabularyTable) -> str:
    """Return `desc` as the inside of a JSON string that contains no text of a special token."""
    text = json.dumps(normal_form(desc), ensure_ascii=False)[1:-1]
    if normal_form(text) != text:  # an accent after an escape would combine with the last letter of the escape
        text = json.dumps(normal_form(desc))[1:-1]
    if table.reserved_starts.isdisjoint(text):
        return text
    for reserved in table.reserved:
        if reserved in text:
            text = text.replace(reserved, f"\\u{ord(reserved[0]):04x}{reserved[1:]}")
    return text
