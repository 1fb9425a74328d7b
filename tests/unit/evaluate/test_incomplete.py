"""Estimates from incomplete labels, on scenes whose true objects are known."""

import numpy as np
import pytest

from coordexp.evaluate.incomplete import (
    P_RANDOM,
    PRECISE,
    AuditedObject,
    audit,
    compare_shares,
    estimate_quality,
)

IMAGES, RUNS = 50, 200
AREA = (0.001, 0.3)  # of an image
KINDS = {"at random": (0.5, 0.5), "by size": (0.25, 0.85)}  # the labelled share of small and of large objects
FOUND = (0.45, 0.9)  # the share of small and of large objects that the model finds


def draw_objects(seed, small, large, *, judged=1.0, clusters=0.0, blind=0.0):
    """Return the labels and the suggestions of images with objects of all sizes, and what a person may add. A part
    of the suggestions is judged. With `clusters`, all objects of a class have a label or none, in so many of the
    images. The model is `blind` for a part of the objects without a label."""
    rng = np.random.default_rng(seed)
    image = np.repeat(np.arange(IMAGES), 1 + rng.poisson(6, IMAGES))
    area = np.exp(rng.uniform(*np.log(AREA), len(image)))
    is_large = area > np.sqrt(AREA[0] * AREA[1])
    kind = rng.integers(3, size=len(image))
    is_cluster, fate = (rng.random((IMAGES, 3)) < share for share in (clusters, small))
    is_labelled = rng.random(len(image)) < np.where(is_large, large, small)
    is_labelled = np.where(is_cluster[image, kind], fate[image, kind], is_labelled)
    skill = rng.uniform(0.8, 1.1, IMAGES)[image]  # the model finds more in some images
    is_found = rng.random(len(image)) < np.where(is_large, FOUND[1], FOUND[0]) * skill
    is_judged = rng.random(len(image)) < judged
    is_found &= is_labelled | (np.random.default_rng((seed, 1)).random(len(image)) >= blind)
    suggestion = np.where(is_found, np.where(is_judged, "accepted", "undecided"), "added")
    state = np.where(is_labelled, np.where(is_found, "found", "unseen"), suggestion)
    objects = [
        AuditedObject(int(image[k]), float(area[k]), "abc"[kind[k]], str(state[k])) for k in range(len(image))
    ]
    noise = np.where(rng.random(75) < judged, "rejected", "undecided")
    return objects + [AuditedObject(int(rng.integers(IMAGES)), 0.01, "a", str(state)) for state in noise]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "clusters", "judged"), [("at random", 0.0, 1.0), ("at random", 0.7, 0.4), ("by size", 0.0, 0.4)]
)
def test_95_of_100_intervals_cover_the_labelled_share_and_labels_missing_at_random_seldom_look_otherwise(
    kind, clusters, judged
):
    low, high = KINDS[kind]
    covered, is_random = [], []
    for seed in range(RUNS):
        result = audit(draw_objects(seed, low, high, judged=judged, clusters=clusters), IMAGES)
        truth = [(result.share, (low + high) / 2), (result.by_size["large"], high)]
        if kind == "at random":
            truth += [(share, low) for share in (result.by_size["small"], *result.by_class.values())]
        covered.append([share.low <= true <= share.high for share, true in truth])
        is_random.append(all(p >= P_RANDOM for p, _ in result.tests.values()))
    shares = np.mean(covered, axis=0)
    print(kind, clusters, judged, "cover:", shares, "at random:", np.mean(is_random))
    assert (shares >= 0.92).all() and shares[0] <= 0.985
    assert np.mean(is_random) >= 0.92 if kind == "at random" else np.mean(is_random) <= 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "images"), [("at random", 15), ("at random", IMAGES), ("by size", IMAGES)])
def test_95_of_100_intervals_cover_the_share_of_complete_images_even_if_the_model_skips_objects(kind, images):
    low, high = KINDS[kind]
    covered = []
    for seed in range(RUNS):
        drawn = draw_objects(seed, low, high, clusters=0.7 * (kind == "at random"), blind=0.5)
        objects = [item for item in drawn if item.image < images]
        results = [audit(objects, images, is_complete) for is_complete in (True, False)]
        truth = [(result.share, (low + high) / 2) for result in results] + [(results[0].by_size["large"], high)]
        covered.append([share.low <= true <= share.high for share, true in truth])
    shares = np.mean(covered, axis=0)
    print(kind, images, "complete, estimated, large in complete images:", shares)
    assert shares[0] >= 0.92 and shares[2] >= 0.92 and shares[0] <= 0.985 and shares[1] < 0.8


def test_labels_that_small_objects_lack_are_noticed_and_do_not_make_others_suspect():
    results = [audit(draw_objects(seed, 0.25, 0.85), IMAGES) for seed in range(20)]
    assert {result.tests["size"][1] for result in results} == {"small"}
    assert max(result.tests["size"][0] for result in results) < P_RANDOM
    assert sum(result.tests["class"][0] >= P_RANDOM for result in results) >= 18


def test_a_complete_data_set_has_a_share_of_one_and_nothing_to_test():
    objects = [AuditedObject(image, 0.1, "cat", "found") for image in range(20) for _ in range(3)]
    result = audit([*objects, AuditedObject(0, 0.1, "cat", "rejected")], 20)
    assert result.share.value == 1 and result.share.high == pytest.approx(1)
    assert 0.9 < result.share.low < 1
    assert result.tests == {}


def test_a_size_that_nobody_labels_has_no_share():
    objects = [AuditedObject(image, 0.1 * size, "cat", "found") for image in range(20) for size in (2, 3, 3)]
    objects += [AuditedObject(image, 0.1, "cat", "accepted") for image in range(20)]
    result = audit(objects, 20)
    assert result.by_size["small"].value == 0 and result.by_size["large"].value == 1
    assert result.share.value == pytest.approx(0.75)


# precision, recall and F1


def draw_counts(seed, p_label=0.6, recall=0.7, wrong=1.5, judged=0.5, images=200, model=None):
    """Return the counts of a model that finds a share of all objects, and the truth: precision, recall, F1. The
    images of a seed are the same for every `model`."""
    rng = np.random.default_rng(seed)
    skill = rng.uniform(0.8, 1.2, images) * recall
    true = 1 + rng.poisson(6, images)
    labels = rng.binomial(true, p_label)
    rng = rng if model is None else np.random.default_rng([seed, *np.atleast_1d(model)])
    matched, extra = rng.binomial(labels, skill), rng.binomial(true - labels, skill)
    noise, misplaced = rng.poisson(wrong, images), rng.poisson(0.3, images)
    accepted, rejected = rng.binomial(extra, judged), rng.binomial(noise, judged)
    suggested = extra + noise
    columns = [matched, matched + suggested + misplaced, labels, suggested, accepted + rejected, accepted]
    precision = 7 * recall / (7 * recall + wrong + 0.3)
    return np.stack(columns, axis=1).astype(float), (
        precision,
        recall,
        2 * precision * recall / (precision + recall),
    )


def draw_share(seed):
    """Return the interval of an audit whose standard error is 0.03."""
    middle = 0.6 + 0.03 * np.random.default_rng(seed + RUNS).normal()
    return middle - 0.06, middle + 0.06


WAYS = pytest.mark.parametrize(("has_share", "is_judged"), [(False, True), (True, True), (True, False)])


@WAYS
def test_95_of_100_intervals_cover_the_quality_against_all_objects(has_share, is_judged):
    covered = []
    for seed in range(RUNS):
        counts, truth = draw_counts(seed)
        share = draw_share(seed) if has_share else None
        estimates = estimate_quality([counts], share, is_judged).estimates.values()
        covered.append([item.low <= true <= item.high for item, true in zip(estimates, truth, strict=True)])
    shares = np.mean(covered, axis=0)
    print(has_share, is_judged, shares)
    assert (shares >= 0.92).all()


@WAYS
def test_95_of_100_intervals_cover_the_difference_of_two_models(has_share, is_judged):
    """The second model finds more, and has more wrong objects."""
    covered, clear = [], []
    for seed in range(RUNS):
        base, before = draw_counts(seed, recall=0.62, wrong=1.0, model=1)
        other, after = draw_counts(seed, recall=0.7, wrong=1.5, judged=0.4, model=2)
        share = draw_share(seed) if has_share else None
        estimates = estimate_quality([other], share, is_judged, base=[base]).estimates.values()
        true = np.subtract(after, before)
        covered.append([item.low <= value <= item.high for item, value in zip(estimates, true, strict=True)])
        clear.append([item.low > 0 or item.high < 0 for item in estimates])
    shares = np.mean(covered, axis=0)
    print(has_share, is_judged, "cover:", shares, "not 0:", np.mean(clear, axis=0))
    assert (shares >= 0.92).all() and shares[:2].min() <= 0.985
    assert np.mean(clear, axis=0)[1] > 0.9  # 8 points of recall are seen in 200 images


@pytest.mark.parametrize(("number", "spread"), [(2, 0.0), (3, 0.04)])
def test_95_of_100_intervals_cover_the_difference_of_groups_of_runs_and_of_other_seeds(number, spread):
    """The recall of runs has this standard deviation over seeds. Nobody has judged anything."""
    levels, covered, over_images = ((0.57, 1.0), (0.65, 1.5)), [], []
    truth = np.subtract(*(draw_counts(0, recall=recall, wrong=wrong)[1] for recall, wrong in levels[::-1]))
    for seed in range(RUNS):
        rng, share, groups = np.random.default_rng(seed + RUNS), draw_share(seed), []
        for k, (recall, wrong) in enumerate(levels, 1):
            recalls = recall + spread * rng.normal(size=number)
            runs = [draw_counts(seed, recall=own, wrong=wrong, model=(k, n)) for n, own in enumerate(recalls)]
            groups.append([counts[:, :3] for counts, _ in runs])
        for count, kept in ((number, covered), (2, over_images)):
            result = estimate_quality(groups[1][:count], share, False, base=groups[0][:count])
            assert (result.seeds_decide is None) == (count < 3)
            found = zip(result.estimates.values(), truth, strict=True)
            kept.append([estimate.low <= value <= estimate.high for estimate, value in found])
    shares, without_seeds = np.mean(covered, axis=0), np.mean(over_images, axis=0)
    print(number, spread, "cover:", shares, "two runs, over images:", without_seeds)
    assert (shares >= 0.92).all() and shares[1] <= 0.985
    assert not spread or without_seeds[1] < 0.85


def test_a_difference_that_only_seeds_can_explain_is_not_clear():
    base, other = (
        [draw_counts(0, recall=level + shift, model=k)[0] for k, shift in enumerate((-0.15, 0, 0.15))]
        for level in (0.5, 0.6)
    )
    few, many = (estimate_quality(other[k:], None, True, base=base[k:]) for k in (1, 0))
    assert few.seeds_decide is None and few.estimates["f1"].low > 0
    assert many.seeds_decide and many.estimates["f1"].low < 0
    assert not estimate_quality(other, None, True, base=other).seeds_decide


def test_images_that_are_hard_for_both_models_do_not_widen_the_interval_of_a_difference():
    base, other = (draw_counts(0, recall=recall, model=1)[0] for recall in (0.6, 0.7))
    half = estimate_quality([other], None, True, base=[base]).estimates["recall"]
    paired, alone = half.high - half.low, estimate_quality([other], None, True).estimates["recall"]
    assert paired < 1.2 * (alone.high - alone.low)  # 1.4 times for two models on different images


def test_three_judgements_that_agree_are_not_certain():
    base, other = (draw_counts(0, judged=0, recall=recall, model=1)[0] for recall in (0.5, 0.7))
    base[:3, 4:] = other[:3, 4:] = 1  # in both, three of three are right
    result = estimate_quality([other], None, True, base=[base])
    assert result.estimates["recall"].low > 0.1
    assert result.estimates["precision"].low < -0.1 and result.estimates["precision"].high > 0.1


def test_as_many_judgements_as_it_says_bring_the_interval_of_a_difference_to_three_points():
    def compare(seed, judged):
        models = [draw_counts(seed, judged=judged, images=400, model=model)[0] for model in (1, 2)]
        return estimate_quality(models[1:], None, True, base=models[:1]), models[0][:, 3].sum()

    first = [compare(seed, 0.05) for seed in range(20)]
    share = 0.05 + np.median([quality.more / suggested for quality, suggested in first])
    f1 = [compare(seed, share)[0].estimates["f1"] for seed in range(20)]
    print(share, halves := [(item.high - item.low) / 2 for item in f1])
    assert 0.05 < share < 1 and np.mean(halves) == pytest.approx(PRECISE, abs=0.003)


def test_what_is_of_nothing_has_no_estimate():
    empty, labelled = np.zeros((20, 6)), np.tile([0.0, 0, 3, 0, 0, 0], (20, 1))
    assert estimate_quality([empty], (0.5, 0.6), False).estimates == {}
    assert set(estimate_quality([labelled], (0.5, 0.6), False).estimates) == {"recall", "f1"}
    assert set(estimate_quality([labelled], None, True, base=[empty]).estimates) == set()


def test_as_many_judgements_as_it_says_bring_the_interval_of_precision_to_three_points():
    counts, _ = draw_counts(0, judged=0.1)
    mores = [estimate_quality([draw_counts(seed, judged=0.1)[0]], None, True).more for seed in range(20)]
    share = 0.1 + np.median(mores) / counts[:, 3].sum()
    halves = []
    for seed in range(20):
        precision = estimate_quality([draw_counts(seed, judged=share)[0]], None, True).estimates["precision"]
        halves.append((precision.high - precision.low) / 2)
    print(mores, np.mean(halves))
    assert min(mores) > 0 and np.mean(halves) == pytest.approx(PRECISE, abs=0.003)


def test_judgements_cannot_replace_images():
    assert estimate_quality([draw_counts(0, images=20)[0]], None, True).more is None
    assert estimate_quality([draw_counts(0, images=2000)[0]], None, True).more == 0


@pytest.mark.parametrize("images", [5, 51, 54])
def test_a_class_that_is_never_labelled_is_not_missing_at_random_even_if_all_images_are_alike(images):
    all_of, none = np.full(images, 3.0), np.zeros(images)
    p, least = compare_shares([("always", all_of, all_of), ("never", none, np.ones(images))])
    assert p < 0.001 and least == "never"


def test_the_interval_of_precision_reaches_what_each_end_of_the_labelled_share_gives():
    counts = np.array([[3.0, 4.0, 4.0, 0.0, 0.0, 0.0]] * 25)  # 75 of 100 predictions match a label
    precision = estimate_quality([counts], (0.5, 0.9), is_judged=False).estimates["precision"]
    assert precision.value == 1.0 and precision.low < 75 / 0.9 / 100
