"""The one sequence that a sample is trained on, with a role for every token (R19, R29).

    prompt | kept prefix of the rollout | what was missed, and the closing brace | end of turn

Ids of the prefix are the rollout's own. Where the cut fell inside of a token, what is kept of it is encoded
together with the continuation, so that `}}` followed by another object becomes `},`, as the model would have
written it, and the model is taught to go on where it stopped. Stage 1 is the same with an empty rollout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from coordexp.config.rollout import RolloutMatching
from coordexp.correction.match import MatchResult
from coordexp.correction.parse import ParsedRollout
from coordexp.correction.serialise import FieldOrder, serialise
from coordexp.correction.transport import coord_targets
from coordexp.data import BINS, Geometry, TrueObject
from coordexp.vocab.table import VocabularyTable


class Role(IntEnum):
    prompt = 0
    masked_prefix = 1
    matched_coord = 2
    tail_structure = 3
    tail_desc = 4
    tail_coord = 5
    end_of_turn = 6


class Kind(IntEnum):
    """What a token of the answer is, supervised or not: the loss terms are normalised by these counts (D19)."""

    none = 0
    structure = 1
    desc = 2
    coord = 3
    end_of_turn = 4


@dataclass(frozen=True, eq=False)
class Segment:
    """Streams with one value per token. `coord_targets` is NaN and `weights` 0 where nothing is supervised;
    `sides` is 1 to 4 at x1, y1, x2, y2 of a supervised box, and 0 elsewhere."""

    ids: NDArray[np.int64]
    roles: NDArray[np.int8]
    kinds: NDArray[np.int8]
    sides: NDArray[np.int8]
    coord_targets: NDArray[np.float32]
    weights: NDArray[np.float32]
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
    """The segment of one sample. `match` pairs `parsed.valid` with `truth`."""
    missed = [truth[j] for j in match.missed]
    kept_text = table.bytes_of(parsed.prefix_ids[-1:]) + parsed.remainder
    fragment = serialise(missed, after=kept_text, first_index=parsed.highest_number + 1, order=order, table=table)
    tail = table.encode(parsed.remainder + fragment.text)
    start = len(prompt_ids)
    tail_start = start + len(parsed.prefix_ids)
    ids = np.array([*prompt_ids, *parsed.prefix_ids, *tail, table.end_of_turn], dtype=np.int64)
    roles = np.zeros(len(ids), dtype=np.int8)
    kinds = np.zeros(len(ids), dtype=np.int8)
    targets = np.full(len(ids), np.nan, dtype=np.float32)

    roles[start:tail_start] = Role.masked_prefix
    kept_ends, tail_ends = _ends(parsed.prefix_ids, table.symbols), _ends(tail, table.pieces)
    offset = int(kept_ends[-1]) if len(kept_ends) else 0
    spans = [*parsed.desc_spans, *_shifted(fragment.desc_spans, offset + len(parsed.remainder))]
    kinds[start:-1] = _kinds(ids[start:-1], np.concatenate((kept_ends, tail_ends + offset)), spans, table)
    where, bins = _matched_targets(parsed, match, truth, settings)
    _check_inside(where, len(parsed.prefix_ids))
    roles[start + where] = Role.matched_coord
    targets[start + where] = bins
    sides = np.zeros(len(ids), dtype=np.int8)
    sides[start + where] = _sides([parsed.valid[i].geometry for i, _ in match.pairs])

    roles[tail_start:-1] = _TAIL_ROLE[kinds[tail_start:-1]]
    appended = tail_start + np.flatnonzero(kinds[tail_start:-1] == Kind.coord)
    targets[appended] = fragment.bins
    sides[appended] = _sides([found.geometry for found in missed])
    if not parsed.fallback:  # what the model wrote itself and nothing was added to
        roles[tail_start:-1][tail_ends <= len(parsed.remainder)] = Role.masked_prefix
    roles[-1], kinds[-1] = Role.end_of_turn, Kind.end_of_turn
    weights = (roles >= Role.matched_coord).astype(np.float32)
    return Segment(ids, roles, kinds, sides, targets, weights, start)


_TAIL_ROLE = np.zeros(len(Kind), dtype=np.int8)
_TAIL_ROLE[[Kind.structure, Kind.desc, Kind.coord]] = [Role.tail_structure, Role.tail_desc, Role.tail_coord]


def _matched_targets(
    parsed: ParsedRollout, match: MatchResult, truth: Sequence[TrueObject], settings: RolloutMatching
) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Where the coordinates of matched objects stand in the rollout, and their targets."""
    predicted = parsed.valid
    shapes = []
    for i, j in match.pairs:
        shape = predicted[i].geometry
        assert shape is not None, "a valid object has a geometry"
        shapes.append((shape, truth[j].geometry))
    targets = coord_targets(shapes, settings.optimal_transport)
    where = [index for i, _ in match.pairs for index in predicted[i].coord_indices]
    bins = [bin for target in targets for bin in target]
    return np.array(where, dtype=np.intp), np.array(bins, dtype=np.float32)


def _sides(shapes: Sequence[Geometry | None]) -> list[int]:
    """For each coordinate of the shapes, which side of a box it is; 0 in polygons."""
    return [
        side
        for shape in shapes
        if shape is not None
        for side in ((1, 2, 3, 4) if shape.kind == "bbox_2d" else (0,) * len(shape.bins))
    ]


def _check_inside(where: NDArray[np.intp], length: int) -> None:
    if len(where) and not 0 <= where.min() <= where.max() < length:
        raise ValueError(
            f"supervised coordinates at {where.min()} to {where.max()} leave the kept prefix of {length} tokens: "
            "the rollout and its parse do not belong together"
        )


def _ends(ids: Sequence[int], texts: Sequence[str] | Sequence[bytes]) -> NDArray[np.int64]:
    """Where each token ends in the text of them all."""
    return np.cumsum([len(texts[id]) for id in ids], dtype=np.int64)


def _shifted(spans: Sequence[tuple[int, int]], offset: int) -> list[tuple[int, int]]:
    return [(start + offset, end + offset) for start, end in spans]


def _kinds(
    ids: NDArray[np.int64],
    ends: NDArray[np.int64],
    desc_spans: Sequence[tuple[int, int]],
    table: VocabularyTable,
) -> NDArray[np.int8]:
    """Coordinates by their ids, desc by lying wholly inside of a desc value, everything else is structure."""
    kinds = np.full(len(ids), Kind.structure, dtype=np.int8)
    if desc_spans:
        spans = np.array(desc_spans, dtype=np.int64)
        starts = np.concatenate(([0], ends[:-1]))
        nearest = np.searchsorted(spans[:, 0], starts, side="right") - 1
        inside = (nearest >= 0) & (starts < ends) & (ends <= spans[nearest, 1])
        kinds[inside] = Kind.desc
    first = table.first_coord
    kinds[(ids >= first) & (ids < first + BINS)] = Kind.coord
    return kinds
