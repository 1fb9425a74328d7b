"""Build the training sequence of a sample, with a role for every token.

    prompt | kept prefix of the rollout | missed objects and the closing brace | end of turn

The ids of the prefix are the rollout's own. If the cut falls inside a token, the kept part of that token is
encoded together with the continuation. For example, if the answer ended with the single token `}}` and an object
was missed, its first brace is kept and encoded together with the comma that follows, as `},`. That is how the
model would have written it, so it learns to continue where it stopped. Stage 1 is the same with an empty rollout.

Missed objects are written as `"object_1": {"desc": "red cup", "bbox_2d": ["<|coord_10|>", ...]}`. Separators are
`, ` and `: `, coordinates are quoted, so that the text is plain JSON, and `poly` is one flat list.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coordexp.answers.entries import Span
from coordexp.answers.match import MatchResult
from coordexp.answers.parse import ParsedRollout
from coordexp.answers.table import VocabularyTable, normal_form
from coordexp.answers.transport import coord_targets
from coordexp.config.rollout import RolloutMatching
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
    to 4 at x1, y1, x2, y2 of a supervised box, and 0 elsewhere. `unlikely` is the id of a token that the model
    should not write in place of this one, because it would begin a duplicate, and -1 where there is none.
    """

    ids: NDArray[np.int64]
    roles: NDArray[np.int8]
    kinds: NDArray[np.int8]
    sides: NDArray[np.int8]
    coord_targets: NDArray[np.float32]
    weights: NDArray[np.float32]
    unlikely: NDArray[np.int64]
    prompt_length: int

    def __len__(self) -> int:
        return len(self.ids)


def build_segment(
    prompt_ids: Sequence[int],
    parsed: ParsedRollout,
    match: MatchResult,
    truth: Sequence[TrueObject],
    *,
    table: VocabularyTable,
    order: FieldOrder,
    settings: RolloutMatching,
) -> Segment:
    """Return the segment of one sample. `match` pairs `parsed.valid` with `truth`."""
    missed = [truth[j] for j in match.missed]
    kept_text = table.bytes_of(parsed.prefix_ids[-1:]) + parsed.remainder
    fragment = serialise(missed, after=kept_text, first_number=parsed.highest_number + 1, order=order, table=table)
    tail = table.encode(parsed.remainder + fragment.text)
    start = len(prompt_ids)
    tail_start = start + len(parsed.prefix_ids)
    ids = np.array([*prompt_ids, *parsed.prefix_ids, *tail, table.end_of_turn], dtype=np.int64)
    roles = np.zeros(len(ids), dtype=np.int8)
    kinds = np.zeros(len(ids), dtype=np.int8)
    targets = np.full(len(ids), np.nan, dtype=np.float32)

    roles[start:tail_start] = Role.masked_prefix
    kept_ends, tail_ends = token_ends(parsed.prefix_ids, table.symbols), token_ends(tail, table.pieces)
    offset = int(kept_ends[-1]) if len(kept_ends) else 0
    spans = [*parsed.desc_spans, *_shift(fragment.desc_spans, offset + len(parsed.remainder))]
    kinds[start:-1] = token_kinds(ids[start:-1], np.concatenate((kept_ends, tail_ends + offset)), spans, table)
    where, bins = _targets_of_matches(parsed, match, truth, settings)
    _check_inside(where, len(parsed.prefix_ids))
    roles[start + where] = Role.matched_coord
    targets[start + where] = bins
    sides = np.zeros(len(ids), dtype=np.int8)
    shapes = parsed.shapes
    sides[start + where] = box_sides([shapes[i] for i, _ in match.pairs])

    roles[tail_start:-1] = SUPERVISED_ROLE[kinds[tail_start:-1]]
    appended = tail_start + np.flatnonzero(kinds[tail_start:-1] == TokenKind.coord)
    targets[appended] = fragment.bins
    sides[appended] = box_sides([true.geometry for true in missed])
    if not parsed.fallback:  # tail tokens that contain only bytes of the rollout stay masked
        roles[tail_start:-1][tail_ends <= len(parsed.remainder)] = Role.masked_prefix
    roles[-1], kinds[-1] = Role.end_of_turn, TokenKind.end_of_turn
    weights = (roles >= Role.matched_coord).astype(np.float32)
    return Segment(ids, roles, kinds, sides, targets, weights, np.full(len(ids), -1, dtype=np.int64), start)


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
        unlikely=np.full(len(ids), -1, dtype=np.int64),
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


def _targets_of_matches(
    parsed: ParsedRollout, match: MatchResult, truth: Sequence[TrueObject], settings: RolloutMatching
) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Return the positions of the coordinates of matched objects in the rollout, and their targets."""
    predicted, shapes = parsed.valid, parsed.shapes
    pairs = [(shapes[i], truth[j].geometry) for i, j in match.pairs]
    targets = coord_targets(pairs, settings.optimal_transport)
    where = [index for i, _ in match.pairs for index in predicted[i].coord_indices]
    bins = [bin for target in targets for bin in target]
    return np.array(where, dtype=np.intp), np.array(bins, dtype=np.float32)


def box_sides(shapes: Sequence[Geometry]) -> list[int]:
    """Return, for each coordinate of the shapes, which side of a box it is, and 0 for polygons."""
    return [
        side for shape in shapes for side in ((1, 2, 3, 4) if shape.kind == "bbox_2d" else (0,) * len(shape.bins))
    ]


def _check_inside(where: NDArray[np.intp], length: int) -> None:
    if len(where) and not 0 <= where.min() <= where.max() < length:
        raise ValueError(
            f"supervised coordinates at {where.min()} to {where.max()} lie outside the kept prefix of {length} "
            "tokens: the rollout and its parse do not belong together"
        )


def token_ends(ids: Sequence[int], texts: Sequence[str] | Sequence[bytes]) -> NDArray[np.int64]:
    """Return the position at which each token ends in the joined text."""
    return np.cumsum([len(texts[id]) for id in ids], dtype=np.int64)


def _shift(spans: Sequence[Span], offset: int) -> list[Span]:
    return [(start + offset, end + offset) for start, end in spans]


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


@dataclass(frozen=True)
class Fragment:
    """Text that continues an answer. `desc_spans` are the positions of its desc values, `bins` its coordinates in
    order, and `ends` the positions after each of its objects."""

    text: bytes
    desc_spans: tuple[Span, ...]
    bins: tuple[int, ...]
    ends: tuple[int, ...]


def serialise(
    objects: Sequence[TrueObject], *, after: bytes, first_number: int, order: FieldOrder, table: VocabularyTable
) -> Fragment:
    """Write `objects` as the continuation of the text `after`, and close the answer. Keys are numbered from
    `first_number`."""
    last = after.rstrip(b" \t\n\r")[-1:]
    if last not in (b"{", b"}", b","):
        raise ValueError(f"the prefix ends in {last!r}; an answer can be continued only after '{{', ',' or '}}'")
    text = bytearray()
    spans: list[Span] = []
    bins: list[int] = []
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
        bins.extend(true.geometry.bins)
        ends.append(len(text))
    return Fragment(bytes(text + b"}"), tuple(spans), tuple(bins), tuple(ends))


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
