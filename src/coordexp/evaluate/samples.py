"""Sampled answers: how good the best of several is, and how many true objects at least one of them has.

The best is chosen per image with the labels, so it is an oracle: no decoder can choose like that. It shows how
much a model could gain from its own answers. If the best of K samples is not clearly above the greedy answer,
training on rollouts has little to teach.

Everything is measured at IoU 0.5, like `f1_50` of an `EvaluationReport`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from coordexp.evaluate.answer import ImageAnswer
from coordexp.evaluate.behaviour import Rate, find_duplicates
from coordexp.evaluate.comparison import compare_images
from coordexp.evaluate.matching import THRESHOLDS, MatchCounts, match_image
from coordexp.evaluate.predictions import Truth
from coordexp.evaluate.report import counts_to_dict


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """The counts of one answer per image, with class and without."""

    with_class: MatchCounts
    any_class: MatchCounts

    def as_dict(self) -> dict[str, Any]:
        return {"with_class": counts_to_dict(self.with_class), "any_class": counts_to_dict(self.any_class)}


@dataclass(frozen=True, slots=True)
class SamplesReport:
    """The counts of the greedy answers, and of the best of the first k samples, by k. `union` is the share of true
    objects that at least one sample has, with class and without."""

    greedy: AnswerCounts
    best: dict[int, AnswerCounts]
    union: Rate
    union_any_class: Rate

    @property
    def count(self) -> int:
        """The number of samples."""
        return max(self.best)

    @property
    def explanation(self) -> str:
        return (
            "best of k: in each image, that of the first k samples with the highest F1 against the labels. If the "
            f"best of {self.count} is not clearly above greedy, rollouts have little to teach."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {
            "count": self.count,
            "explanation": self.explanation,
            "greedy": self.greedy.as_dict(),
            "best": [{"k": k, **counts.as_dict()} for k, counts in self.best.items()],
            "union_recall": {"with_class": self.union.value, "any_class": self.union_any_class.value},
        }


@dataclass(frozen=True, slots=True)
class _Outcome:
    """An answer to an image, compared with its labels. `with_class` and `any_class` are the true objects that it
    has."""

    counts: AnswerCounts
    with_class: frozenset[int]
    any_class: frozenset[int]
    duplicates: int

    @property
    def rank(self) -> tuple[float, int]:
        """F1, then the absence of duplicates. No prediction where there is no object is right."""
        f1 = self.counts.with_class.f1
        return 1.0 if f1 is None else f1, -self.duplicates


def evaluate_samples(
    truth: Truth, greedy: Sequence[ImageAnswer], samples: Sequence[Sequence[ImageAnswer]]
) -> SamplesReport:
    """Compare greedy and sampled answers with the ground truth of the same images. `samples` has a list for each
    sample, with an answer per image. Raise DataError if they do not belong together."""
    by_image = list(zip(*[_compare(truth, answers) for answers in samples], strict=True))
    best = {
        k: _add_up(max(outcomes[:k], key=attrgetter("rank")) for outcomes in by_image)
        for k in sample_counts(len(samples))
    }
    true = best[1].with_class.true
    union, union_any_class = (
        Rate(sum(len(frozenset[int]().union(*map(objects, outcomes))) for outcomes in by_image), true)
        for objects in (attrgetter("with_class"), attrgetter("any_class"))
    )
    return SamplesReport(_add_up(_compare(truth, greedy)), best, union, union_any_class)


def sample_counts(count: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `count`, and `count` itself."""
    return sorted({count, *(2**k for k in range(count.bit_length()))})


def _compare(truth: Truth, answers: Sequence[ImageAnswer]) -> list[_Outcome]:
    outcomes = []
    for image in compare_images(truth, answers):
        matching = match_image(image, THRESHOLDS[:1])
        pairs = matching.with_class[0], matching.any_class[0]
        counts = AnswerCounts(*(MatchCounts(len(side), len(image.predicted), len(image.true)) for side in pairs))
        with_class, any_class = (frozenset(j for _, j in side) for side in pairs)
        outcomes.append(_Outcome(counts, with_class, any_class, len(find_duplicates(image, matching))))
    return outcomes


def _add_up(outcomes: Iterable[_Outcome]) -> AnswerCounts:
    total = AnswerCounts(MatchCounts(0, 0, 0), MatchCounts(0, 0, 0))
    for outcome in outcomes:
        counts = outcome.counts
        total = AnswerCounts(total.with_class + counts.with_class, total.any_class + counts.any_class)
    return total
