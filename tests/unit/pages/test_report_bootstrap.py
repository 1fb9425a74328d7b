"""Intervals of differences: correct for known cases, paired, and as certain as the data allow."""

import numpy as np
import pytest

from coordexp.intervals import bootstrap_differences, estimate_seed_interval


def shares(hits):
    """Return the counts of a rate that is 0 or 1 per image."""
    hits = np.asarray(hits, np.int64)
    return {"rate": np.stack([hits, np.ones_like(hits)], axis=1)}


def hard_and_easy(rng, images, ease=0.0, noise=0.1):
    """Return two runs on the same images. An image is hard or easy for both, apart from some `noise`."""
    easy = rng.random(images)
    first = (easy + noise * rng.normal(size=images)) > 0.5
    second = (easy + ease + noise * rng.normal(size=images)) > 0.5
    return shares(first), shares(second)


def compare(base, other, resamples=2000):
    (difference,) = bootstrap_differences(base, other, resamples=resamples)
    return difference


def test_a_run_compared_with_itself_has_a_difference_of_exactly_zero():
    run, _ = hard_and_easy(np.random.default_rng(0), 500)
    difference = compare([run], [run])
    assert (difference.value, difference.image_interval, difference.is_clear) == (0.0, (0.0, 0.0), False)


def test_the_interval_of_a_mean_is_the_normal_one():
    """The difference of two shares of the same images is a mean, and its interval 1.96 standard errors."""
    base, other = hard_and_easy(np.random.default_rng(1), 4000, ease=0.05)
    difference = compare([base], [other], resamples=8000)
    change = other["rate"][:, 0] - base["rate"][:, 0]
    half = 1.96 * change.std() / np.sqrt(len(change))
    low, high = difference.image_interval
    assert low == pytest.approx(change.mean() - half, abs=0.05 * half)
    assert high == pytest.approx(change.mean() + half, abs=0.05 * half)


def test_without_variance_over_images_the_interval_over_seeds_is_that_of_welch():
    from scipy.stats import ttest_ind

    base, other = np.array([0.70, 0.72, 0.69]), np.array([0.74, 0.73, 0.78, 0.75])
    low, high = estimate_seed_interval(other.mean() - base.mean(), 0.0, [base, other])
    known = ttest_ind(other, base, equal_var=False).confidence_interval(0.95)
    assert (low, high) == pytest.approx((known.low, known.high))


def test_the_interval_over_seeds_covers_other_seeds_and_the_one_over_images_does_not():
    rng = np.random.default_rng(9)
    covered = {"images": 0, "seeds": 0}
    for _ in range(200):
        groups = [[shares(rng.random(400) < 0.5 + 0.05 * rng.normal()) for _ in range(3)] for _ in range(2)]
        difference = compare(*groups, resamples=200)
        for name, (low, high) in (("images", difference.image_interval), ("seeds", difference.seed_interval)):
            covered[name] += low <= 0.0 <= high
    assert covered["seeds"] / 200 >= 0.93
    assert covered["images"] / 200 < 0.8


def draw(rng, rate, images=400):
    return {"rate": np.stack([rng.binomial(5, rate, images), np.full(images, 5)], axis=1)}


def compare_pairs(pairs, resamples=2000):
    """Return the interval of paired seeds, or over images if there is only one."""
    (difference,) = bootstrap_differences(*zip(*pairs, strict=True), resamples=resamples, paired=True)
    return difference.seed_interval or difference.image_interval


def test_the_interval_of_paired_seeds_holds_images_and_seeds():
    def width(*rates):
        rng = np.random.default_rng(1)
        low, high = compare_pairs([(draw(rng, 0.5), draw(rng, rate)) for rate in rates])
        assert low < np.mean(rates) - 0.5 < high
        return high - low

    one, agreeing, differing = width(0.7), width(0.7, 0.7, 0.7), width(0.6, 0.7, 0.8)
    assert 0.03 < one < 0.08 and agreeing < one < differing


def test_the_interval_of_pairs_covers_the_difference_and_ignores_what_the_seeds_of_both_share():
    rng, covered = np.random.default_rng(2), 0
    for _ in range(200):
        shifts, shared = rng.normal(0, 0.05, 3), rng.normal(0, 0.1, 3)
        pairs = [
            (draw(rng, 0.5 + own, 100), draw(rng, 0.5 + own + k, 100))
            for k, own in zip(shifts, shared, strict=True)
        ]
        low, high = compare_pairs(pairs, resamples=200)
        covered += low <= 0 <= high
    assert covered >= 180
    alike = [(draw(rng, level), draw(rng, level + 0.1)) for level in (0.3, 0.5, 0.7)]
    assert compare_pairs(alike)[0] > 0
    assert bootstrap_differences(*zip(*alike, strict=True))[0].seed_interval[0] < 0


def test_a_difference_that_seeds_can_explain_is_not_clear():
    groups = [[shares(np.arange(100) < hits) for hits in counts] for counts in ((40, 60, 50), (52, 72, 62))]
    difference = compare(*groups)
    assert difference.image_interval[0] > 0 and difference.seed_interval[0] < 0
    assert not difference.is_clear


def test_a_rate_without_a_denominator_is_left_out_and_a_rare_one_has_no_interval():
    none = {"rate": shares(np.ones(40))["rate"], "never": np.zeros((40, 2), np.int64)}
    rare = np.zeros((40, 2), np.int64)
    rare[0] = 1, 1
    rows = bootstrap_differences([none | {"rare": rare}], [none | {"rare": rare}], resamples=200)
    assert [row.name for row in rows] == ["rate", "rare"]
    assert rows[1].image_interval is None and not rows[1].is_clear
