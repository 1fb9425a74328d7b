"""What can be said from incomplete labels: the share of the objects that is labelled, whether labels are missing
at random, and the precision and recall of answers.

The model suggests objects that no label explains, and a person judges a random part of them, or all. An accepted
one is an object whose label is missing. Others are known in images that a person has completed, and elsewhere
estimated by Chapman's formula: among objects of about the same size, a model is assumed to find those without a
label as often as others.

Every estimate is a function of sums over images. Its variance is that of the jackknife, which leaves out one image
at a time, so it includes that only a part of the suggestions was judged. An interval is Wilson's, for as many
trials as have that variance, with the quantile of Student's t. That of a difference of two models is symmetric.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
SIZES = ("small", "medium", "large")
STRATA = 2 * len(SIZES)  # halves of these, in which missing labels are estimated
CROWDS = ("few", "some", "many")
MIN_OBJECTS = 5  # of a class whose share is estimated, and of a group in a test
PRECISE = 0.03  # half of an interval of precision, or of a difference of F1, that more judgements should reach
STEP = 0.01  # of the share of suggestions that are right, for slopes
MEASURES = ("precision", "recall", "f1")
P_RANDOM = 0.05 / 3  # three tests, so that one of them is below by chance in at most 5 of 100 audits

Floats = NDArray[np.float64]
State = Literal["found", "unseen", "accepted", "rejected", "undecided", "added"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} (95 %: {self.low:.2f} to {self.high:.2f})"


def student(images: int) -> float:
    """Return the number of standard errors on each side of an estimate from this many images."""
    from scipy.stats import t

    return float(t.ppf((1 + LEVEL) / 2, max(1, images - 1)))


def jackknife(columns: Floats, statistic: Callable[[Floats], Floats]) -> tuple[Floats, Floats]:
    """Return a statistic of the sums of the columns, [images, columns], and its variance."""
    sums, images = columns.sum(axis=0), len(columns)
    without = statistic(sums - columns)
    return statistic(sums), (images - 1) * without.var(axis=0)


def wilson(value: float, variance: float, trials: float, images: int) -> Estimate:
    """Return the interval of a share that is known from at most this many trials."""
    value, t = min(1.0, max(0.0, value)), student(images)
    if variance > 0:
        trials = min(trials, value * (1 - value) / variance) or trials
    scale = 1 + t**2 / trials
    centre = (value + t**2 / (2 * trials)) / scale
    half = t / scale * np.sqrt(value * (1 - value) / trials + t**2 / (4 * trials**2))
    return Estimate(value, max(0.0, float(centre - half)), min(1.0, float(centre + half)))


@dataclass(frozen=True, slots=True)
class AuditedObject:
    """A label that the model found or did not see, a suggestion that a person accepted, rejected or has not
    decided about, or what they added to both. `image` is its number, and `area` a share of the image."""

    image: int
    area: float
    desc: str
    state: State


@dataclass(frozen=True)
class Audit:
    """The labelled share of all objects, by size (thirds of the objects) and by class. `tests` are by size,
    crowding and class, as far as there are enough objects: p, and the group with the smallest labelled share."""

    share: Estimate
    by_size: dict[str, Estimate]
    by_class: dict[str, Estimate]
    tests: dict[str, tuple[float, str]]


def audit(objects: Sequence[AuditedObject], images: int, is_complete: bool = False) -> Audit:
    """Estimate the labelled share from all objects of the audited images. At least one has to be found or
    accepted. In complete images, all suggestions are decided and all others added."""
    image = np.array([item.image for item in objects])
    area = np.array([item.area for item in objects])
    desc = np.array([item.desc for item in objects], dtype=object)
    state = np.array([item.state for item in objects])
    is_found = np.isin(state, ["found", "unseen"] if is_complete else ["found"])
    is_accepted = np.isin(state, ["accepted", "added"] if is_complete else ["accepted"])
    is_label, is_judged = is_found | (state == "unseen"), is_accepted | (state == "rejected")
    is_suggested, is_known = is_judged | (state == "undecided"), is_found | is_accepted

    def count(chosen: NDArray[np.bool_]) -> Floats:
        return np.bincount(image[chosen], minlength=images).astype(float)

    weights = np.where(is_accepted, is_suggested.sum() / max(1, is_judged.sum()), 1.0)[is_known]

    def divide(values: Floats, parts: int) -> NDArray[np.intp]:
        """Return the number of the group of each object, of groups with as many objects that are known."""
        places = np.arange(1, parts) / parts
        bounds = np.quantile(values[is_known], places, weights=weights, method="inverted_cdf")
        return np.digitize(values, bounds)

    strata = [divide(area, STRATA) == k for k in range(STRATA)]
    sizes = {name: strata[2 * k] | strata[2 * k + 1] for k, name in enumerate(SIZES)}
    context = [count(is_label & part) for part in strata] + [count(is_found & part) for part in strata]
    context += [count(is_suggested), count(is_judged)]

    def share_of(part: NDArray[np.bool_]) -> Estimate:
        own = [count(is_label & part)] + [count(is_accepted & part & stratum) for stratum in strata]
        value, variance = jackknife(np.stack(own + context, axis=1), _labelled_share)
        return wilson(float(value), float(variance), max(1, int((is_known & part).sum())), images)

    crowd = count(is_found | is_suggested)[image]
    classes = [name for name, number in Counter(desc[is_known]).most_common() if number >= MIN_OBJECTS]
    crowds = divide(crowd, len(CROWDS))
    groups = {
        "size": sizes,
        "crowding": {name: crowds == k for k, name in enumerate(CROWDS)},
        "class": {name: desc == name for name in classes},
    }
    tests = {
        by: compare_shares(
            [(name, count(is_found & part), count(is_known & part)) for name, part in parts.items()]
        )
        for by, parts in groups.items()
    }
    return Audit(
        share_of(np.full(len(objects), True)),
        {name: share_of(part) for name, part in sizes.items() if (part & is_known).any()},
        {name: share_of(part) for name, part in groups["class"].items()},
        {by: test for by, test in tests.items() if test is not None},
    )


def _labelled_share(sums: Floats) -> Floats:
    """Return the labelled share of a part of the objects. The sums are its labels and, by size, its accepted
    suggestions; then the labels of all objects and those found, by size; then suggestions, and those judged."""
    labels, suggested, judged = sums[..., 0], sums[..., -2], np.maximum(sums[..., -1], 1)
    accepted, all_labels, found_labels = np.split(sums[..., 1:-2], 3, axis=-1)
    scale = np.where(suggested > 0, suggested / judged, 1)
    missing = (accepted * (all_labels + 1) / (found_labels + 1)).sum(axis=-1) * scale
    return np.asarray(labels / np.maximum(labels + missing, 1e-9))


def compare_shares(groups: Sequence[tuple[str, Floats, Floats]]) -> tuple[float, str] | None:
    """Return p of the hypothesis that groups of objects have the same labelled share, and the group with the
    smallest. It is a score test with the variance between images: the objects of an image need not be independent.
    A group has its labelled objects and all of its objects by image. Return None with fewer than two groups of
    enough objects, or if all have a label or none."""
    from scipy.stats import f

    kept = [group for group in groups if group[2].sum() >= MIN_OBJECTS]
    if len(kept) < 2:
        return None
    labelled, known = (np.stack([group[k] for group in kept], axis=1) for k in (1, 2))
    pooled, images, freedom = labelled.sum() / known.sum(), len(known), len(kept) - 1
    if pooled in (0, 1) or images <= len(kept):
        return None
    excess = labelled - pooled * known
    excess -= excess.sum(axis=1, keepdims=True) * known.sum(axis=0) / known.sum()
    total = excess.sum(axis=0)
    statistic = float(total @ np.linalg.pinv(excess.T @ excess, hermitian=True) @ total)
    rest = max(images - statistic, 1e-9 * images)  # 0 if the groups differ alike in all images
    ratio = statistic * (images - freedom) / (freedom * rest)  # Hotelling's
    least = kept[int(np.argmin(labelled.sum(axis=0) / known.sum(axis=0)))][0]
    return float(f.sf(ratio, freedom, images - freedom)), least


@dataclass(frozen=True)
class Quality:
    """Precision, recall and F1 against all objects, with and without a label, or how much higher they are than
    those of another model. What is of nothing is left out. `more` is how many more judgements of each model would
    bring the interval of precision, or of the difference of F1, to 3 points on each side: None if judgements alone
    cannot."""

    estimates: dict[str, Estimate]
    more: int | None


def estimate_quality(
    counts: Floats, share: tuple[float, float] | None, is_judged: bool, *, base: Floats | None = None
) -> Quality:
    """Estimate quality from a row for each image: predicted objects that match a label, all of them, and labels;
    then suggestions among the others, those judged, and those accepted. With the rows of another model on the same
    images as `base`, estimate how much higher quality is than there.

    Without judgements, the interval of the labelled share says how many predicted objects are right. With both, it
    says how many objects there are. Without it, recall is that on the labels, which is right if labels are missing
    at random."""
    models = np.stack([counts] if base is None else [base, counts], axis=1)
    sums, images, middle = models.sum(axis=0), len(models), share and sum(share) / 2

    def measure(rows: Floats, share: float | None = middle) -> Floats:
        quality = _quality(rows, share, is_judged)
        return np.asarray(quality[..., -1, :] - (0 if base is None else quality[..., 0, :]))

    values, variances = jackknife(models, measure)
    more = None
    if is_judged:
        fixed, by_judging = _split_variance(models, measure)
        variances = np.maximum(variances, fixed + (by_judging / np.maximum(1, sums[:, 4:5])).sum(axis=0))
        k = MEASURES.index("precision" if base is None else "f1")
        room = (PRECISE / student(images)) ** 2 - float(fixed[k])
        needed = float(by_judging[:, k].sum()) / room if room > 0 else math.inf
        more = None if needed > sums[:, 3].min() else max(0, math.ceil(needed - sums[:, 4].min()))
    ends = np.stack([values, *(measure(sums, end) for end in share or ())])
    predicted, true = sums[:, 1:3].min(axis=0).tolist()
    trials = {"precision": predicted, "recall": true, "f1": true and predicted + true}
    estimates = {}
    for k, name in enumerate(MEASURES):
        if trials[name]:
            value, half = float(values[k]), student(images) * math.sqrt(variances[k])
            estimate = Estimate(value, value - half, value + half)
            if base is None:
                estimate = wilson(value, float(variances[k]), trials[name], images)
            estimates[name] = _widen(estimate, ends[:, k], least=0.0 if base is None else -1.0)
    return Quality(estimates, more)


def _widen(estimate: Estimate, ends: Floats, least: float) -> Estimate:
    """Return the estimate with an interval that includes the values at both ends of the labelled share, too."""
    value = estimate.value
    below = math.hypot(value - estimate.low, value - float(ends.min()))
    above = math.hypot(estimate.high - value, float(ends.max()) - value)
    return Estimate(value, max(least, value - below), min(1.0, value + above))


def _quality(sums: Floats, share: float | None, is_judged: bool) -> Floats:
    matched, predicted, true, suggested, judged, accepted = np.moveaxis(sums, -1, 0)
    right = matched + suggested * accepted / np.maximum(judged, 1) if is_judged else matched / (share or 1)
    hits = matched if share is None else right * share
    precision = np.minimum(1, right / np.maximum(predicted, 1))
    recall = np.minimum(1, hits / np.maximum(true, 1))
    return np.stack([precision, recall, 2 * precision * recall / np.maximum(precision + recall, 1e-9)], axis=-1)


def _split_variance(models: Floats, measure: Callable[[Floats], Floats]) -> tuple[Floats, Floats]:
    """Return the variance that measures have if it is known which share of the suggestions is right, and for each
    model what a single judgement adds. The share is Laplace's: few judgements that all agree are not certain."""
    _, _, _, _, judged, accepted = models.sum(axis=0).T
    shares = (accepted + 1) / (judged + 2)

    def judge_all(shares: Floats) -> Floats:
        """Return the rows after all suggestions were judged, of which these shares are right."""
        suggested = models[..., 3]
        return np.concatenate([models[..., :4], np.stack([suggested, suggested * shares], axis=-1)], axis=-1)

    values, fixed = jackknife(judge_all(shares), measure)
    below = [measure(judge_all(row).sum(axis=0)) for row in shares - STEP * np.eye(len(shares))]
    slopes = (values - np.stack(below)) / STEP
    return fixed, (shares * (1 - shares))[:, None] * slopes**2
