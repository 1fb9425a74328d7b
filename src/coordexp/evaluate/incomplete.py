"""What can be said from incomplete labels: the share of the objects that is labelled, whether labels are missing
at random, and the precision and recall of answers.

The model suggests objects that no label explains, and a person judges a random part of them, or all. An accepted
one is an object whose label is missing. Others are known in images that a person has completed, and elsewhere
estimated by Chapman's formula: among objects of about the same size, a model is assumed to find those without a
label as often as others.

Every estimate is a function of sums over images. Its variance is that of the jackknife, which leaves out one image
at a time, so it includes that only a part of the suggestions was judged. An interval is Wilson's, for as many
trials as have that variance, with the quantile of Student's t. That of a difference of two models is symmetric.
Of several runs that differ only in seeds, quality is the mean, as in `coordexp.intervals`.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coordexp.intervals import Estimate, Floats, Interval, estimate_seed_interval, jackknife, student, wilson

SIZES = ("small", "medium", "large")
STRATA = 2 * len(SIZES)  # halves of these, in which missing labels are estimated
CROWDS = ("few", "some", "many")
MIN_OBJECTS = 5  # of a class whose share is estimated, and of a group in a test
PRECISE = 0.03  # half of an interval of precision, or of a difference of F1, that more judgements should reach
STEP = 0.01  # of the share of suggestions that are right, for slopes
MEASURES = ("precision", "recall", "f1")
P_RANDOM = 0.05 / 3  # three tests, so that one of them is below by chance in at most 5 of 100 audits

JUDGE = "judge suggestions (evaluate --judged)"
TOO_MANY_MATCHES = f"more predicted objects match a label than the labelled share allows: {JUDGE}"
State = Literal["found", "unseen", "accepted", "rejected", "undecided", "added"]


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
    those of another model. What is of nothing is left out. `more` is how many more judgements of each run would
    bring the interval of precision, or of the difference of F1, to 3 points on each side: None if judgements alone
    cannot. `seeds_decide` is whether F1 differs clearly over images, and only other seeds may explain it: None if
    the intervals are over images alone."""

    estimates: dict[str, Estimate]
    more: int | None
    seeds_decide: bool | None


def estimate_quality(
    runs: Sequence[Floats], share: Interval | None, is_judged: bool, *, base: Sequence[Floats] = ()
) -> Quality:
    """Estimate the mean quality of runs that differ only in seeds, or how much higher it is than that of other
    runs on the same images, `base`. A run has a row for each image: predicted objects that match a label, all of
    them, and labels; if it is judged, also suggestions among the others, those judged, and those accepted.

    Without judgements, the interval of the labelled share says how many predicted objects are right. With both, it
    says how many objects there are. Without it, recall is that on the labels, which is right if labels are missing
    at random."""
    models, split = np.stack([*base, *runs], axis=1), len(base)
    weights = np.repeat([-1 / max(1, split), 1 / len(runs)], [split, len(runs)])
    sums, images, middle = models.sum(axis=0), len(models), share and sum(share) / 2

    def measure(rows: Floats, share: float | None = middle) -> Floats:
        return np.asarray(weights @ _quality(rows, share, is_judged))

    (values, variances), more = jackknife(models, measure), None
    if is_judged:
        least, more = _plan_judgements(models, measure, MEASURES.index("f1" if base else "precision"))
        variances = np.maximum(variances, least)
    ends = np.stack([measure(sums, end) for end in (middle, *(share or ()))])
    halves, by_run = student(images) * np.sqrt(variances), _quality(sums, middle, is_judged)
    predicted, true = sums[:, 1:3].min(axis=0).tolist()
    estimates, seeds_decide = {}, None
    for k, trials in enumerate([predicted, true, true and predicted + true]):
        value, variance = float(values[k]), float(variances[k])
        if trials and base:
            interval = estimate_seed_interval(value, variance, [by_run[:split, k], by_run[split:, k]])
            seeds_decide = None if interval is None else bool(abs(value) > halves[k])
            estimate = Estimate(value, *(interval or (value - halves[k], value + halves[k])))
            estimates[MEASURES[k]] = _widen(estimate, ends[:, k], least=-1.0)
        elif trials:
            estimates[MEASURES[k]] = _widen(wilson(value, variance, trials, images), ends[:, k], least=0.0)
    return Quality(estimates, more, seeds_decide)


def _widen(estimate: Estimate, ends: Floats, least: float) -> Estimate:
    """Return the estimate with an interval that includes the values at both ends of the labelled share, too."""
    value = estimate.value
    below = math.hypot(value - estimate.low, value - float(ends.min()))
    above = math.hypot(estimate.high - value, float(ends.max()) - value)
    return Estimate(value, max(least, value - below), min(1.0, value + above))


def _quality(sums: Floats, share: float | None, is_judged: bool) -> Floats:
    matched, predicted, true, *judgements = np.moveaxis(sums, -1, 0)
    right = matched / (share or 1)
    if is_judged:
        suggested, judged, accepted = judgements
        right = matched + suggested * accepted / np.maximum(judged, 1)
    hits = matched if share is None else right * share
    precision = np.minimum(1, right / np.maximum(predicted, 1))
    recall = np.minimum(1, hits / np.maximum(true, 1))
    return np.stack([precision, recall, 2 * precision * recall / np.maximum(precision + recall, 1e-9)], axis=-1)


def _plan_judgements(
    models: Floats, measure: Callable[[Floats], Floats], decisive: int
) -> tuple[Floats, int | None]:
    """Return the least variances of measures that this many judgements allow, and how many more of each run make
    the decisive one precise. The share of right suggestions is Laplace's: few that all agree are not certain."""
    suggested, judged, accepted = models.sum(axis=0)[:, 3:].T
    shares = (accepted + 1) / (judged + 2)

    def judge_all(shares: Floats) -> Floats:
        """Return the rows after all suggestions were judged, of which these shares are right."""
        columns = models[..., 3]
        return np.concatenate([models[..., :4], np.stack([columns, columns * shares], axis=-1)], axis=-1)

    values, fixed = jackknife(judge_all(shares), measure)
    below = [measure(judge_all(row).sum(axis=0)) for row in shares - STEP * np.eye(len(shares))]
    by_judging = (shares * (1 - shares))[:, None] * ((values - np.stack(below)) / STEP) ** 2
    room = (PRECISE / student(len(models))) ** 2 - float(fixed[decisive])
    needed = float(by_judging[:, decisive].sum()) / room if room > 0 else math.inf
    more = None if needed > suggested.min() else max(0, math.ceil(needed - judged.min()))
    return fixed + (by_judging / np.maximum(1, judged)[:, None]).sum(axis=0), more


@dataclass(frozen=True)
class QualityReport:
    """The quality of one model, or of two and how much higher that of the second is: for JSON, as the cells of a
    table by measure, and what follows. A note says if the labelled share is not possible."""

    content: dict[str, Any]
    title: str
    rows: dict[str, list[str]]
    note: str
    conclusion: str


def compare_quality(
    models: Sequence[Sequence[Floats]], share: Interval | None, is_judged: bool, letters: str = "AB"
) -> QualityReport:
    """Estimate the quality of one model, or of two and their difference. A model has runs as in
    `estimate_quality`."""
    qualities = [estimate_quality(runs, share, is_judged) for runs in models]
    rows = {name: [str(quality.estimates.get(name, "-")) for quality in qualities] for name in MEASURES}
    title, content = "estimated, against all objects, with and without a label", asdict(qualities[0])
    title += f"; labelled share {share[0]:g} to {share[1]:g}" if share else ""
    conclusion = _advise("precision", qualities[0].more, is_judged)
    if len(models) > 1:
        difference = estimate_quality(models[1], share, is_judged, base=models[0])
        content = {"estimates": list(map(asdict, qualities)), "difference": asdict(difference)}
        with_seeds = "" if difference.seeds_decide is None else ", that of the difference also over seeds"
        title += f"; intervals over images{with_seeds}"
        for name, estimate in difference.estimates.items():
            rows[name].append(estimate.describe_difference())
        advice = "train more seeds" if difference.seeds_decide else _advise("it", difference.more, is_judged)
        f1 = difference.estimates.get("f1")
        conclusion = f1.describe_verdict("estimated F1", advice, letters) if f1 else ""
    matched = [estimate_quality(runs, None, False).estimates.get("precision") for runs in models]
    is_possible = is_judged or not share or not any(known and known.low > share[1] for known in matched)
    return QualityReport(content, title, rows, "" if is_possible else TOO_MANY_MATCHES, conclusion)


def _advise(subject: str, more: int | None, is_judged: bool) -> str:
    """Return what makes an interval narrow. `more` is how many more judgements do, or None if they cannot."""
    if more == 0:
        return f"{subject} is known to 3 points"
    enough = "judge more images" if more is None else f"judge {more:,} more suggestions of each model"
    return f"to know {subject} to 3 points, {enough if is_judged else JUDGE}"
