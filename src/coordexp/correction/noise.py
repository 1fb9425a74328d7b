"""Make an answer with mistakes from the labels: a control for rollouts, which costs no generation.

If training on such answers helps as much as training on the model's own, rollouts are not worth their cost.
"""

import random
from collections.abc import Sequence

from coordexp.config.rollout import NoiseAnswers
from coordexp.correction.segment import FieldOrder, serialise
from coordexp.data import BINS, Geometry, TrueObject, is_degenerate
from coordexp.vocab.table import VocabularyTable


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
