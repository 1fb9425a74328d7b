"""Build the target of a rollout: the answer that the model should have given, with a role for every token.

    prompt | tokens of the rollout up to the first change | the rest of the corrected answer | end of turn

What is supervised is one rule for every policy. A coordinate has a loss if it has a target: that of the true
object that it was matched with, or its own bin where the object was missed. An object without a target, such as a
false positive, has no loss at all. The text of missed objects has a loss, and that of matched ones as the policy
says. The closing brace and the end of turn have one.

Under the specified policy (`CorrectionPolicy.is_specified`), the text of the rollout is kept as it is, up to the
point from which it can be continued, and the missed objects are appended. The ids before that point are the
rollout's own. If it falls inside a token, the kept part of that token is encoded together with the continuation.
For example, if the answer ended with the single token `}}` and an object was missed, its first brace is kept and
encoded together with the comma that follows, as `},`. That is how the model would have written it, so it learns to
continue where it stopped. Stage 1 is the same with an empty rollout.

Under any other policy the answer is rebuilt: objects are removed, inserted or moved. It is plain JSON in the
project's own format, numbered from 1. It has every true object exactly once: as the model wrote it if it was
found, else as the ground truth says it. Objects that are not valid are left out. The tokens of the rollout are
kept as long as they spell the rebuilt answer, object by object; from the first difference on, the answer is
encoded anew.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordexp.answers.entries import Span
from coordexp.answers.match import MatchResult, find_repeats, match_objects, pairwise_iou, without_other_names
from coordexp.answers.parse import ParsedRollout
from coordexp.answers.segment import (
    SUPERVISED_ROLE,
    FieldOrder,
    Fragment,
    Role,
    Segment,
    TokenKind,
    serialise,
    token_ends,
    token_kinds,
)
from coordexp.answers.table import VocabularyTable
from coordexp.answers.transport import coord_targets
from coordexp.config.rollout import CorrectionPolicy, RolloutMatching
from coordexp.data import Geometry, TrueObject


class Part(IntEnum):
    """How much of a part of the corrected answer has a loss."""

    context = 0  # it has none
    matched = 1  # the coordinates have one, and what the policy adds
    missed = 2  # everything has one


class Item(NamedTuple):
    """An object of the corrected answer.

    `predicted` is its index among the valid objects of the rollout, or None if it was inserted. `true` is its
    index among the true objects, or None for an extra and for an object that several answers agree on. `targets`
    are those of its coordinates, or None if the object is not supervised.
    """

    predicted: int | None
    true: int | None
    desc: str
    geometry: Geometry
    targets: tuple[float, ...] | None

    @classmethod
    def insert(cls, true: int | None, thing: TrueObject, *, is_supervised: bool = True) -> "Item":
        """Return the item of an object that the rollout does not have."""
        targets = tuple(map(float, thing.geometry.bins)) if is_supervised else None
        return cls(None, true, thing.desc, thing.geometry, targets)

    @property
    def part(self) -> Part:
        if self.targets is None:
            return Part.context
        return Part.missed if self.predicted is None else Part.matched

    @property
    def sides(self) -> tuple[int, ...]:
        """Return, for each coordinate, which side of a box it is; 0 for polygons and without supervision."""
        is_box = self.geometry.kind == "bbox_2d" and self.targets is not None
        return (1, 2, 3, 4) if is_box else (0,) * len(self.geometry.bins)


@dataclass(frozen=True)
class Rebuilt:
    """A record of what a policy did. `duplicates` and `removed_extras` are indices of valid objects that were left
    out, and `own_tokens` is the number of tokens of the rollout that were kept. Matched objects that a policy of
    another package leaves out are among `removed_extras`."""

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


def build_target(
    prompt_ids: Sequence[int],
    parsed: ParsedRollout,
    match: MatchResult,
    truth: Sequence[TrueObject],
    *,
    table: VocabularyTable,
    order: FieldOrder,
    settings: RolloutMatching,
    agreed: Sequence[TrueObject] | None = None,
    complete: Collection[str] = (),
) -> tuple[Segment, Rebuilt | None]:
    """Return the segment of the corrected answer, and what was changed, or None if the answer was only continued.

    `match` pairs `parsed.valid` with `truth`. `agreed` are objects that no label has and several answers do: with
    them, even if there are none, the answer is rebuilt under every policy. `complete` are the classes of which
    every object is labelled: with `extras: remove_exhaustive`, others of such a class are mistakes."""
    policy, valid = settings.correction, parsed.valid
    is_kept = policy.is_specified and agreed is None
    duplicates: tuple[int, ...] = ()
    if policy.duplicates != "keep":
        duplicates = find_repeats(parsed, settings, [i for i, _ in match.pairs])
    extras = [i for i in match.false_positives if i not in duplicates]
    known = complete if policy.extras == "remove_exhaustive" else ()
    mistakes = {i for i in extras if valid[i].desc in known}
    possible = [thing for thing in agreed or () if thing.desc not in known]
    confirmed, unseen = _match_agreed(parsed, [i for i in extras if i not in mistakes], possible, settings)
    removed = tuple(i for i in extras if i in mistakes or (policy.extras == "remove" and i not in confirmed))
    items = _make_predicted_items(parsed, match, truth, {*duplicates, *removed}, confirmed, settings)
    items += [Item.insert(None, thing, is_supervised=settings.choice.pseudo_labels) for thing in unseen]
    items += [Item.insert(j, truth[j]) for j in match.missed]
    items = _order_items(items, policy)
    if policy.added_policy is not None and valid:  # answers that are made from labels are not revised
        items = list(policy.added_policy.config.revise(items, truth, complete))
    answer = (_continue_answer if is_kept else _rewrite_answer)(parsed, items, order, table)
    segment = _make_segment(prompt_ids, parsed, answer, items, policy, table)
    if is_kept:
        return segment, None
    kept = {item.predicted for item in items}
    left_out = tuple(i for i in range(len(valid)) if i not in kept and i not in duplicates)
    return segment, Rebuilt(tuple(items), duplicates, left_out, answer.own_tokens)


def _match_agreed(
    parsed: ParsedRollout, extras: Sequence[int], agreed: Sequence[TrueObject], settings: RolloutMatching
) -> tuple[dict[int, TrueObject], list[TrueObject]]:
    """Return the extras that are among the agreed objects, and the agreed objects that this answer does not have.
    An agreed object that repeats any object of the answer, such as a duplicate that was removed, is neither."""
    if not agreed:
        return {}, []
    shapes, names = parsed.shapes, parsed.names
    agreed_shapes, agreed_names = [thing.geometry for thing in agreed], [thing.desc for thing in agreed]
    own = [shapes[i] for i in extras], [names[i] for i in extras]
    match = match_objects(own[0], agreed_shapes, settings, (own[1], agreed_names))
    iou = pairwise_iou([*shapes, *agreed_shapes], settings.maskiou_resolution)[len(shapes) :, : len(shapes)]
    iou = without_other_names(iou, agreed_names, names, settings)
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
            items.append(Item(i, partner.get(i), desc, shapes[i], targets.get(i)))
    return items


def _order_items(items: list[Item], policy: CorrectionPolicy) -> list[Item]:
    """Return the items in the order of the policy: as they are, or with all true objects in the order of the
    ground truth and extras among them."""
    if policy.insertion == "append":
        return items
    labelled = sorted((item for item in items if item.true is not None), key=_true_index)
    extras = [item for item in items if item.true is None]
    if policy.insertion == "reading_order":
        return _place_in_reading_order(extras, labelled)
    # followers[k] stand behind k true objects.
    followers: list[list[Item]] = [[] for _ in range(len(labelled) + 1)]
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
    bins = item.geometry.bins
    return min(bins[1::2]), min(bins[::2])


def _true_index(item: Item) -> int:
    assert item.true is not None
    return item.true


@dataclass(frozen=True)
class _Answer:
    """The tokens of a corrected answer, without the end of turn. The first `own_tokens` are the rollout's, and
    `own_spans` the positions of the names in their text. `ends` are the positions after each token. `fragment` is
    the text that begins at `begin`; its objects are the last ones of the answer."""

    ids: tuple[int, ...]
    ends: NDArray[np.int64]
    own_tokens: int
    own_spans: tuple[Span, ...]
    fragment: Fragment
    begin: int

    @property
    def bounds(self) -> list[int]:
        """Return the position at which the objects of the fragment begin, and those after each of them."""
        return [self.begin, *(self.begin + end for end in self.fragment.ends)]


def _continue_answer(
    parsed: ParsedRollout, items: Sequence[Item], order: FieldOrder, table: VocabularyTable
) -> _Answer:
    """Return the kept text of the rollout with the missed objects behind it."""
    missed = [item for item in items if item.predicted is None]
    after, number = table.bytes_of(parsed.prefix_ids[-1:]) + parsed.remainder, parsed.highest_number + 1
    fragment = serialise(missed, after=after, first_number=number, order=order, table=table)
    own = token_ends(parsed.prefix_ids, table.symbols)
    start = int(own[-1]) if len(own) else 0
    new = table.encode(parsed.remainder + fragment.text)
    ends = np.concatenate((own, token_ends(new, table.pieces) + start))
    ids, begin = (*parsed.prefix_ids, *new), start + len(parsed.remainder)
    return _Answer(ids, ends, len(own), parsed.desc_spans, fragment, begin)


def _rewrite_answer(
    parsed: ParsedRollout, items: Sequence[Item], order: FieldOrder, table: VocabularyTable
) -> _Answer:
    """Return the answer with these objects, with the tokens of the rollout as far as they spell it."""
    fragment = serialise(items, after=b"{", first_number=1, order=order, table=table)
    text = b"{" + fragment.text
    own_ends = token_ends(parsed.prefix_ids, table.pieces)
    own = bisect_right(own_ends, _count_unchanged_bytes(parsed, items, text, fragment, table))
    start = int(own_ends[own - 1]) if own else 0
    new = table.encode(text[start:])
    ends = np.concatenate((own_ends[:own], token_ends(new, table.pieces) + start))
    return _Answer((*parsed.prefix_ids[:own], *new), ends, own, (), fragment, begin=1)


def _count_unchanged_bytes(
    parsed: ParsedRollout, items: Sequence[Item], text: bytes, fragment: Fragment, table: VocabularyTable
) -> int:
    """Return how much of the text the model wrote itself, in whole objects. An object counts only if it was valid,
    so that coordinates spelled in ordinary tokens are never kept."""
    written = table.bytes_of(parsed.prefix_ids) + parsed.remainder
    same = 0
    for k, (item, prediction, end) in enumerate(zip(items, parsed.objects, fragment.ends, strict=False)):
        end += 1  # the fragment begins after the brace
        if item.predicted != k or not prediction.is_valid or written[same:end] != text[same:end]:
            break
        same = end
    return same


def _make_segment(
    prompt_ids: Sequence[int],
    parsed: ParsedRollout,
    answer: _Answer,
    items: Sequence[Item],
    policy: CorrectionPolicy,
    table: VocabularyTable,
) -> Segment:
    """Return the segment of the answer, with the role, target and weight of each token. The losses of the run then
    choose positions by these."""
    ids = np.array([*prompt_ids, *answer.ids, table.end_of_turn], dtype=np.int64)
    start, tail_start = len(prompt_ids), len(prompt_ids) + answer.own_tokens
    kinds, roles, sides = (np.zeros(len(ids), dtype=np.int8) for _ in range(3))
    spans = [*answer.own_spans, *((answer.begin + a, answer.begin + b) for a, b in answer.fragment.desc_spans)]
    kinds[start:-1] = token_kinds(ids[start:-1], answer.ends, spans, table)

    # A token belongs to the part in which it ends. The first part is what stands before the objects that are
    # written, the kept text or the opening brace, and the last is the closing brace.
    written = items[len(items) - len(answer.fragment.ends) :]
    first = Part.missed if parsed.fallback else Part.context
    parts = np.array([first, *(item.part for item in written), Part.missed])
    owners = np.searchsorted(answer.bounds, answer.ends)
    roles[start:-1] = _roles_of_text(policy)[parts[owners], kinds[start:-1]]
    roles[-1], kinds[-1] = Role.end_of_turn, TokenKind.end_of_turn

    own = np.array([k for prediction in parsed.valid for k in prediction.coord_indices], dtype=np.intp)
    if len(own) and not 0 <= own.min() <= own.max() < len(parsed.prefix_ids):
        raise ValueError(
            f"supervised coordinates at {own.min()} to {own.max()} lie outside the kept prefix of "
            f"{len(parsed.prefix_ids)} tokens: the rollout and its parse do not belong together"
        )
    new = np.flatnonzero(kinds[tail_start:-1] == TokenKind.coord)
    where = np.concatenate((start + own[own < answer.own_tokens], tail_start + new))
    targets = np.full(len(ids), np.nan, dtype=np.float32)
    targets[where] = [bin for item in items for bin in item.targets or (np.nan,) * len(item.geometry.bins)]
    sides[where] = [side for item in items for side in item.sides]
    roles[(roles == Role.masked_prefix) & ~np.isnan(targets)] = Role.matched_coord

    weights = (roles >= Role.matched_coord).astype(np.float32)
    weights[start:-1][owners == len(parts) - 1] *= policy.closing_weight
    return Segment(ids, roles, kinds, sides, targets, weights, start)


def _roles_of_text(policy: CorrectionPolicy) -> NDArray[np.int8]:
    """Return the role of each kind of token in each part. Matched coordinates have theirs from their targets."""
    roles = np.full((len(Part), len(TokenKind)), Role.masked_prefix, dtype=np.int8)
    roles[Part.missed] = SUPERVISED_ROLE
    if policy.supervise != "missed":
        roles[Part.matched, TokenKind.structure] = Role.tail_structure
    if policy.supervise == "matched_with_desc":
        roles[Part.matched, TokenKind.desc] = Role.tail_desc
    return roles
