"""Choose among several answers to one image, and correct the chosen one: parse it, match its objects, and append
the missed ones, or rebuild it as a policy says.

The functions are pure, and training and `coordexp replay` share them. Training on the ground truth alone is the
case of an empty answer. Answers with mistakes can also be made from the labels: a control for rollouts, which
costs no generation. If training on them helps as much, rollouts are not worth their cost.
"""

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.answers.match import MatchResult, find_repeats, match_answer, pairwise_iou, without_other_names
from coordexp.answers.parse import ParsedRollout, parse_rollout
from coordexp.answers.segment import FieldOrder, Segment, serialise
from coordexp.answers.table import VocabularyTable
from coordexp.answers.target import Rebuilt, build_target
from coordexp.config.rollout import NoiseAnswers, RolloutMatching
from coordexp.data import BINS, Geometry, TrueObject, is_degenerate


@dataclass(frozen=True)
class Choice:
    """The answer that is trained on, as an index, and the objects that enough answers agree on and that no label
    has. `agreed` is None unless the rule is `union`."""

    index: int
    agreed: tuple[TrueObject, ...] | None = None


def choose_answer(
    answers: Sequence[Sequence[int]],
    truth: Sequence[TrueObject],
    *,
    table: VocabularyTable,
    settings: RolloutMatching,
) -> Choice:
    """Return the choice of the answer with the highest F1 against the labels, by shapes alone. Of several, it is
    the one with the fewest duplicates, then the most right names, then the fewest invalid objects, then the
    first."""
    if len(answers) == 1:
        return Choice(0)
    parsed = [parse_rollout(answer, table) for answer in answers]
    matches = [match_answer(answer, truth, settings) for answer in parsed]
    ranks = [_rank(answer, match, truth, settings) for answer, match in zip(parsed, matches, strict=True)]
    index = max(range(len(parsed)), key=ranks.__getitem__)
    if settings.choice.rule == "best":
        return Choice(index)
    return Choice(index, find_agreed(parsed, matches, truth, settings))


def _rank(
    answer: ParsedRollout, match: MatchResult, truth: Sequence[TrueObject], settings: RolloutMatching
) -> tuple[float, int, int, int]:
    valid = answer.valid
    total = len(valid) + len(truth)
    f1 = 2 * len(match.pairs) / total if total else 1.0
    matched = [i for i, _ in match.pairs]
    duplicates = find_repeats(answer, settings, matched)
    right_names = sum(valid[i].desc == truth[j].desc for i, j in match.pairs)
    invalid = len(answer.objects) - len(valid) + answer.unread + answer.fallback
    return f1, -len(duplicates), right_names, -invalid


def find_agreed(
    answers: Sequence[ParsedRollout],
    matches: Sequence[MatchResult],
    truth: Sequence[TrueObject],
    settings: RolloutMatching,
) -> tuple[TrueObject, ...]:
    """Return the objects that at least `choice.votes` answers have and that overlap no true object by
    `maskiou_gate`. Duplicates within an answer do not count.

    Objects of different answers are the same if they overlap like duplicates. The sides of an agreed box are the
    medians over the answers, an agreed polygon is that of the first answer, and the desc is the most frequent one.
    With `match_classes` other than `any`, only objects of the same name are compared; an object that takes the
    label of another class in every answer that has it is a wrong name of that one, and is not agreed on.
    """
    objects, is_extra = [], []
    for number, (answer, match) in enumerate(zip(answers, matches, strict=True)):
        duplicates = find_repeats(answer, settings)
        kept = [i for i in range(len(answer.shapes)) if i not in duplicates]
        objects += [(number, TrueObject(answer.names[i], answer.shapes[i])) for i in kept]
        is_extra += [i in match.false_positives for i in kept]
    if not objects:
        return ()
    things = [*(thing for _, thing in objects), *truth]
    iou = pairwise_iou([thing.geometry for thing in things], settings.maskiou_resolution)[: len(objects)]
    names = [thing.desc for thing in things]
    iou = without_other_names(iou, names[: len(objects)], names, settings)
    is_free = np.logical_not((iou[:, len(objects) :] >= settings.maskiou_gate).any(axis=1))
    is_same = iou[:, : len(objects)] >= settings.correction.duplicate_iou
    agreed = []
    for first in range(len(objects)):
        if not is_free[first]:
            continue
        members: dict[int, TrueObject] = {}
        group = np.flatnonzero(is_same[first] & is_free).tolist()
        for k in group:
            is_free[k] = False
            members.setdefault(objects[k][0], objects[k][1])
        if len(members) >= settings.choice.votes and any(is_extra[k] for k in group):
            agreed.append(_merge(objects[first][1], list(members.values())))
    return tuple(agreed)


def _merge(first: TrueObject, members: Sequence[TrueObject]) -> TrueObject:
    desc = Counter(member.desc for member in members).most_common(1)[0][0]
    if any(member.geometry.kind != "bbox_2d" for member in members):
        return TrueObject(desc, first.geometry)
    sides = np.median([member.geometry.bins for member in members], axis=0)
    x1, y1, x2, y2 = (round(side) for side in sides.tolist())
    return TrueObject(desc, Geometry("bbox_2d", (x1, y1, x2, y2)))


@dataclass(frozen=True, eq=False)
class Correction:
    """A corrected answer with the steps that led to it. `match` pairs `parsed.valid` with the true objects.
    `rebuilt` is None if the answer is kept as it is and only continued."""

    parsed: ParsedRollout
    match: MatchResult
    segment: Segment
    rebuilt: Rebuilt | None = None

    @property
    def own_tokens(self) -> int:
        """Return how many tokens of the rollout the corrected answer begins with."""
        return len(self.parsed.prefix_ids) if self.rebuilt is None else self.rebuilt.own_tokens


def correct(
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    truth: Sequence[TrueObject],
    *,
    table: VocabularyTable,
    order: FieldOrder,
    settings: RolloutMatching,
    agreed: Sequence[TrueObject] | None = None,
    complete: Collection[str] = (),
) -> Correction:
    """Return the correction of an answer, given the token ids of its prompt and the true objects of its image.
    `agreed` are objects without a label that several answers to the image have. It is None unless the rule of the
    choice is `union`. `complete` are the classes of which every object of the image is labelled."""
    parsed = parse_rollout(answer_ids, table)
    match = match_answer(parsed, truth, settings)
    segment, rebuilt = build_target(
        prompt_ids,
        parsed,
        match,
        truth,
        table=table,
        order=order,
        settings=settings,
        agreed=agreed,
        complete=complete,
    )
    return Correction(parsed, match, segment, rebuilt)


def make_noisy_answer(
    truth: Sequence[TrueObject], noise: NoiseAnswers, seed: int, *, table: VocabularyTable, order: FieldOrder
) -> list[int]:
    """Return the ids of an answer that lists the true objects in their order, with mistakes: some are left out,
    all are shifted a little, some are repeated, and boxes that mean nothing stand between them."""
    chooser = random.Random(seed)  # noqa: S311  (not a secret)
    objects = []
    for true in truth:
        if chooser.random() >= noise.drop:
            objects.append(_shift(true, noise.jitter, chooser))
            if chooser.random() < noise.repeat:
                objects.append(_shift(true, noise.jitter, chooser))
        if chooser.random() < noise.random:
            objects.append(TrueObject(chooser.choice(truth).desc, _random_box(chooser)))
    answer = serialise(objects, after=b"{", first_number=1, order=order, table=table)
    return table.encode(b"{" + answer.text)


def _shift(true: TrueObject, jitter: float, chooser: random.Random) -> TrueObject:
    """Return the object with every coordinate moved by up to `jitter` of its width or height. A shape that would
    lose its area stays as it is."""
    bins = true.geometry.bins
    sizes = [max(bins[axis::2]) - min(bins[axis::2]) for axis in (0, 1)]
    moved = tuple(
        min(BINS - 1, max(0, round(bin + chooser.uniform(-jitter, jitter) * sizes[k % 2])))
        for k, bin in enumerate(bins)
    )
    if is_degenerate(true.geometry.kind, moved):
        moved = bins
    return TrueObject(true.desc, Geometry(true.geometry.kind, moved))


def _random_box(chooser: random.Random) -> Geometry:
    (x1, x2), (y1, y2) = (sorted(chooser.sample(range(BINS), 2)) for _ in range(2))
    return Geometry("bbox_2d", (x1, y1, x2, y2))
