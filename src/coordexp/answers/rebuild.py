"""Rebuild an answer under a correction policy: remove, insert or move objects, and supervise more than the missed
ones.

    prompt | tokens of the rollout up to the first change | the rest of the rebuilt answer | end of turn

The rebuilt answer is plain JSON in the project's own format, numbered from 1. It has every true object exactly
once: as the model wrote it if it was found, else as the ground truth says it. Objects that are not valid are left
out. The tokens of the rollout are kept as long as they spell the rebuilt answer, object by object; from the first
difference on, the answer is encoded anew.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordexp.answers.match import MatchResult, find_duplicates, match_objects, pairwise_iou
from coordexp.answers.parse import ParsedRollout
from coordexp.answers.segment import (
    SUPERVISED_ROLE,
    FieldOrder,
    Fragment,
    Role,
    Segment,
    TokenKind,
    box_sides,
    serialise,
    token_ends,
    token_kinds,
)
from coordexp.answers.table import VocabularyTable
from coordexp.answers.transport import coord_targets
from coordexp.config.rollout import CorrectionPolicy, RolloutMatching
from coordexp.data import Geometry, TrueObject


@dataclass(frozen=True)
class Item:
    """An object of the rebuilt answer.

    `predicted` is its index among the valid objects of the rollout, or None if it was inserted. `true` is its
    index among the true objects, or None for an extra and for an object that several answers agree on. `content`
    is what the answer says. `targets` are those of its coordinates, or None if the object is not supervised.
    """

    predicted: int | None
    true: int | None
    content: TrueObject
    targets: tuple[float, ...] | None


@dataclass(frozen=True)
class Rebuilt:
    """A record of what a policy did. `duplicates` and `removed_extras` are indices of valid objects that were left
    out, and `own_tokens` is the number of tokens of the rollout that were kept."""

    items: tuple[Item, ...]
    duplicates: tuple[int, ...]
    removed_extras: tuple[int, ...]
    own_tokens: int

    @property
    def moved(self) -> tuple[int, ...]:
        """Return the valid objects that now stand behind one that the model wrote after them."""
        highest, moved = -1, []
        for item in self.items:
            if item.predicted is not None:
                if item.predicted < highest:
                    moved.append(item.predicted)
                highest = max(highest, item.predicted)
        return tuple(moved)


def rebuild(
    prompt_ids: Sequence[int],
    parsed: ParsedRollout,
    match: MatchResult,
    truth: Sequence[TrueObject],
    *,
    table: VocabularyTable,
    order: FieldOrder,
    settings: RolloutMatching,
    agreed: Sequence[TrueObject] = (),
) -> tuple[Segment, Rebuilt]:
    """Return the segment of the rebuilt answer, and what was changed. `match` pairs `parsed.valid` with `truth`,
    and `agreed` are objects that no label has and several answers do."""
    policy, valid, shapes = settings.correction, parsed.valid, parsed.shapes
    duplicates: tuple[int, ...] = ()
    if policy.duplicates != "keep":
        duplicates = find_duplicates(
            shapes, policy.duplicate_iou, settings.maskiou_resolution, [i for i, _ in match.pairs]
        )
    extras = [i for i in match.false_positives if i not in duplicates]
    confirmed, unseen = _match_agreed(shapes, extras, agreed, settings)
    removed = tuple([i for i in extras if policy.extras == "remove" and i not in confirmed])
    items = _order_items(
        [
            *_make_predicted_items(parsed, match, truth, {*duplicates, *removed}, confirmed, settings),
            *(
                Item(None, None, thing, _bins(thing) if settings.choice.pseudo_labels else None)
                for thing in unseen
            ),
            *(Item(None, j, truth[j], _bins(truth[j])) for j in match.missed),
        ],
        policy,
    )
    fragment = serialise([item.content for item in items], after=b"{", first_number=1, order=order, table=table)
    answer = _Answer.of(parsed, items, fragment, table)
    segment = _make_segment(prompt_ids, answer, items, policy, table, starts_anew=parsed.fallback)
    if policy.duplicates == "unlikelihood":
        entries = [(i, TrueObject(str(valid[i].desc), shapes[i])) for i in duplicates]
        _mark_unlikely(segment, answer, items, entries, order, table)
    return segment, Rebuilt(tuple(items), duplicates, removed, answer.own_tokens)


def _match_agreed(
    shapes: Sequence[Geometry], extras: Sequence[int], agreed: Sequence[TrueObject], settings: RolloutMatching
) -> tuple[dict[int, TrueObject], list[TrueObject]]:
    """Return the extras that are among the agreed objects, and the agreed objects that this answer does not have.
    An agreed object that repeats any object of the answer, such as a duplicate that was removed, is neither."""
    if not agreed:
        return {}, []
    agreed_shapes = [thing.geometry for thing in agreed]
    match = match_objects([shapes[i] for i in extras], agreed_shapes, settings)
    iou = pairwise_iou([*shapes, *agreed_shapes], settings.maskiou_resolution)[len(shapes) :, : len(shapes)]
    repeats = set(np.nonzero(iou >= settings.correction.duplicate_iou)[0].tolist())
    return {extras[i]: agreed[j] for i, j in match.pairs}, [agreed[j] for j in match.missed if j not in repeats]


def _make_predicted_items(
    parsed: ParsedRollout,
    match: MatchResult,
    truth: Sequence[TrueObject],
    left_out: set[int],
    confirmed: Mapping[int, TrueObject],
    settings: RolloutMatching,
) -> list[Item]:
    """Return the predicted objects that stay, in the order of the answer. `confirmed` are extras that other
    answers have too, with what they agree on."""
    partner, shapes = dict(match.pairs), parsed.shapes
    labels = {i: truth[j] for i, j in match.pairs}
    if settings.choice.pseudo_labels:
        labels |= confirmed
    pairs = [(shapes[i], label.geometry) for i, label in labels.items()]
    targets = dict(zip(labels, coord_targets(pairs, settings.optimal_transport), strict=True))
    corrects_desc = settings.correction.supervise == "matched_with_desc"
    items = []
    for i, prediction in enumerate(parsed.valid):
        if i not in left_out:
            desc = labels[i].desc if i in labels and corrects_desc else str(prediction.desc)
            items.append(Item(i, partner.get(i), TrueObject(desc, shapes[i]), targets.get(i)))
    return items


def _bins(thing: TrueObject) -> tuple[float, ...]:
    return tuple(map(float, thing.geometry.bins))


def _order_items(items: list[Item], policy: CorrectionPolicy) -> list[Item]:
    """Return the items in the order of the policy: as they are, or with all true objects in the order of the
    ground truth and extras among them."""
    if policy.insertion == "append":
        return items
    labelled = sorted((item for item in items if item.true is not None), key=_true_index)
    extras = [item for item in items if item.true is None]
    if policy.insertion == "reading_order":
        return _place_in_reading_order(extras, labelled)
    followers: list[list[Item]] = [
        [] for _ in range(len(labelled) + 1)
    ]  # followers[k] stand behind k true objects
    place = 0
    for item in items:
        if item.true is None:
            followers[place].append(item)
        elif item.predicted is not None:
            place = item.true + 1
    return [*followers[0], *(item for k, true in enumerate(labelled, 1) for item in (true, *followers[k]))]


def _place_in_reading_order(extras: Sequence[Item], labelled: Sequence[Item]) -> list[Item]:
    """Return all items, with each extra before the first true object that begins below it, or beside it and
    further right."""
    waiting = deque(sorted(extras, key=_corner))
    result: list[Item] = []
    for item in labelled:
        while waiting and _corner(waiting[0]) < _corner(item):
            result.append(waiting.popleft())
        result.append(item)
    return [*result, *waiting]


def _corner(item: Item) -> tuple[int, int]:
    """Return the top and the left edge of an object."""
    bins = item.content.geometry.bins
    return min(bins[1::2]), min(bins[::2])


def _true_index(item: Item) -> int:
    assert item.true is not None
    return item.true


@dataclass(frozen=True)
class _Answer:
    """The tokens of a rebuilt answer, without the end of turn. `bounds` are the positions in its text after the
    opening brace and after each object, and `ends` the positions after each token."""

    text: bytes
    ids: tuple[int, ...]
    ends: NDArray[np.int64]
    bounds: tuple[int, ...]
    desc_spans: tuple[tuple[int, int], ...]
    own_tokens: int

    @classmethod
    def of(
        cls, parsed: ParsedRollout, items: Sequence[Item], fragment: Fragment, table: VocabularyTable
    ) -> "_Answer":
        text = b"{" + fragment.text
        bounds = (1, *(end + 1 for end in fragment.ends))
        own_ends = token_ends(parsed.prefix_ids, table.pieces)
        written = table.bytes_of(parsed.prefix_ids) + parsed.remainder
        own = bisect_right(own_ends, _count_unchanged_bytes(parsed, items, text, bounds, written))
        start = int(own_ends[own - 1]) if own else 0
        new = table.encode(text[start:])
        ends = np.concatenate((own_ends[:own], token_ends(new, table.pieces) + start))
        spans = tuple([(begin + 1, end + 1) for begin, end in fragment.desc_spans])
        return cls(text, (*parsed.prefix_ids[:own], *new), ends, bounds, spans, own)


def _count_unchanged_bytes(
    parsed: ParsedRollout, items: Sequence[Item], text: bytes, bounds: Sequence[int], written: bytes
) -> int:
    """Return how much of the text the model wrote itself, in whole objects. An object counts only if it was valid,
    so that coordinates spelled in ordinary tokens are never kept."""
    same = 0
    for k, (item, prediction) in enumerate(zip(items, parsed.objects, strict=False)):
        if item.predicted != k or not prediction.is_valid:
            break
        same = k + 1
    end = bounds[same]
    if written[:end] != text[:end]:
        same = bisect_right(bounds, _common_length(written[:end], text[:end])) - 1
    return bounds[same] if same > 0 else 0


def _make_segment(
    prompt_ids: Sequence[int],
    answer: _Answer,
    items: Sequence[Item],
    policy: CorrectionPolicy,
    table: VocabularyTable,
    starts_anew: bool,
) -> Segment:
    ids = np.array([*prompt_ids, *answer.ids, table.end_of_turn], dtype=np.int64)
    start = len(prompt_ids)
    kinds = np.zeros(len(ids), dtype=np.int8)
    kinds[start:-1] = token_kinds(ids[start:-1], answer.ends, answer.desc_spans, table)
    roles = np.zeros(len(ids), dtype=np.int8)
    # A token belongs to the object in which it ends: 0 is the opening brace, and the last is the closing one.
    owners = np.searchsorted(answer.bounds, answer.ends)
    by_owner = np.array(
        [_roles_of_brace(starts_anew), *(_roles_of_item(item, policy) for item in items), _roles_of_brace(True)],
        dtype=np.int8,
    )
    roles[start:-1] = by_owner[owners, kinds[start:-1]]
    roles[-1], kinds[-1] = Role.end_of_turn, TokenKind.end_of_turn
    where = np.flatnonzero(kinds == TokenKind.coord)
    targets = np.full(len(ids), np.nan, dtype=np.float32)
    targets[where] = [value for item in items for value in item.targets or _nothing(item)]
    sides = np.zeros(len(ids), dtype=np.int8)
    sides[where] = [
        side
        for item in items
        for side in (box_sides([item.content.geometry]) if item.targets else [0] * len(item.content.geometry.bins))
    ]
    weights = (roles >= Role.matched_coord).astype(np.float32)
    weights[start:-1][owners == len(items) + 1] *= policy.closing_weight  # nothing but the closing brace
    return Segment(ids, roles, kinds, sides, targets, weights, np.full(len(ids), -1, dtype=np.int64), start)


def _nothing(item: Item) -> tuple[float, ...]:
    return (np.nan,) * len(item.content.geometry.bins)


def _roles_of_brace(is_supervised: bool) -> list[int]:
    """Return the role of each kind of token in an outer brace."""
    return [int(SUPERVISED_ROLE[kind]) if is_supervised else Role.masked_prefix for kind in TokenKind]


def _roles_of_item(item: Item, policy: CorrectionPolicy) -> list[int]:
    """Return the role of each kind of token in an object."""
    roles: list[int] = [Role.masked_prefix] * len(TokenKind)
    if item.targets is None:
        return roles
    if item.predicted is None:
        return [int(role) for role in SUPERVISED_ROLE]
    roles[TokenKind.coord] = Role.matched_coord
    if policy.supervise != "missed":
        roles[TokenKind.structure] = Role.tail_structure
    if policy.supervise == "matched_with_desc":
        roles[TokenKind.desc] = Role.tail_desc
    return roles


def _mark_unlikely(
    segment: Segment,
    answer: _Answer,
    items: Sequence[Item],
    duplicates: Sequence[tuple[int, TrueObject]],
    order: FieldOrder,
    table: VocabularyTable,
) -> None:
    """For each duplicate, mark the first token at which it would differ from the rebuilt answer, had the model
    written it behind the object that it followed.

    Of several duplicates at one token, the first is marked. A supervised coordinate gets no mark: its own loss
    says which bins are right there, and the bin of the duplicate may be one of them.
    """
    places = sorted((item.predicted, k) for k, item in enumerate(items, 1) if item.predicted is not None)
    for i, duplicate in duplicates:
        before = bisect_left(places, (i, 0))
        place = places[before - 1][1] if before else 0
        end = answer.bounds[place]
        entry = serialise([duplicate], after=answer.text[:end], first_number=place + 1, order=order, table=table)
        differing = end + _common_length(entry.text, answer.text[end : end + len(entry.text)])
        # Tokens up to the first differing byte can differ, from the one that contains the place on.
        likely = segment.prompt_length + int(np.searchsorted(answer.ends, differing, side="right"))
        if segment.unlikely[likely] >= 0:
            continue
        first = int(np.searchsorted(answer.ends, end, side="right"))
        start = int(answer.ends[first - 1]) if first else 0
        written = table.encode(answer.text[start:end] + entry.text[: entry.ends[0]])
        for position, (wrong, right) in enumerate(zip(written, answer.ids[first:], strict=False), first):
            if wrong != right:
                at = segment.prompt_length + position
                if segment.unlikely[at] < 0 and np.isnan(segment.coord_targets[at]):
                    segment.unlikely[at] = wrong
                break


def _common_length(left: bytes, right: bytes) -> int:
    """Return the number of bytes at the beginning that are the same."""
    length = min(len(left), len(right))
    pair = [np.frombuffer(part, dtype=np.uint8, count=length) for part in (left, right)]
    differing = np.flatnonzero(pair[0] != pair[1])
    return int(differing[0]) if len(differing) else length
