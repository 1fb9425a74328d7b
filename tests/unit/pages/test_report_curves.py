"""From the logs of runs to the points of a chart: bounded in number, without hiding a value."""

import math

import numpy as np
import pytest

from coordexp.errors import DataError
from coordexp.pages.charts import (
    Scale,
    choose_log_ticks,
    choose_ticks,
    format_number,
    format_tick,
    format_ticks,
    pad_range,
)
from coordexp.pages.curves import (
    MAX_POINTS,
    Series,
    StepRanges,
    build_curve,
    collect_series,
    divide,
    divide_steps,
    smooth,
)
from tests.unit.pages.run_folders import make_series


def test_each_name_has_the_steps_at_which_it_was_logged():
    log = collect_series([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "eval_f1_50": 0.5}], "m")
    assert log["loss"].steps.tolist() == [1, 2]
    assert log["eval_f1_50"].steps.tolist() == [2]


def test_null_is_kept_as_a_value_that_is_not_a_number():
    loss = collect_series([{"step": 1, "loss": None}, {"step": 2, "loss": 1.0}], "m")["loss"]
    assert loss.invalid_steps.tolist() == [1] and loss.last == 1.0


def test_infinite_values_are_not_numbers():
    loss = collect_series([{"step": 1, "loss": math.inf}, {"step": 2, "loss": -math.inf}], "m")["loss"]
    assert np.isnan(loss.values).all()


def test_the_last_value_counts_if_a_step_was_logged_twice():
    loss = collect_series([{"step": 1, "loss": 9.0}, {"step": 2, "loss": 8.0}, {"step": 1, "loss": 1.0}], "m")[
        "loss"
    ]
    assert loss.steps.tolist() == [1, 2] and loss.values.tolist() == [1.0, 8.0]


@pytest.mark.parametrize(
    "line",
    [
        *({"loss": 1.0}, {"step": "1", "loss": 1.0}, {"step": 1, "loss": "much"}, {"step": 1, "loss": True}),
        *({"step": 1, "loss": 10**400}, {"step": 1, "loss": 1e308}, {"step": 1, "loss": -1e308}),
    ],
)
def test_a_line_that_no_run_writes_is_reported_with_its_number(line):
    with pytest.raises(DataError, match=r"metrics.jsonl, line 1: \w+ .* is not a"):
        collect_series([line], "metrics.jsonl")


def test_a_ratio_has_the_steps_that_both_have_without_zero_denominators():
    ratio = divide(make_series((1, 2.0), (2, 3.0), (4, 1.0)), make_series((2, 6.0), (3, 1.0), (4, 0.0)))
    assert ratio.steps.tolist() == [2] and ratio.values.tolist() == [0.5]


def test_few_steps_become_one_point_each():
    logged = make_series((1, 3.0), (5, 2.0), (9, 1.0))
    curve = build_curve([logged], divide_steps([logged], 1))
    assert curve.steps.tolist() == [1, 5, 9] and curve.mean.tolist() == [3.0, 2.0, 1.0]


def test_ten_thousand_steps_become_two_hundred_points_whose_band_covers_every_value():
    rng = np.random.default_rng(0)
    logged = Series(np.arange(1, 10_001), rng.normal(size=10_000))
    curve = build_curve([logged], divide_steps([logged], 1))
    assert len(curve) == MAX_POINTS
    assert curve.highest.max() == logged.values.max() and curve.lowest.min() == logged.values.min()
    assert curve.mean[0] == pytest.approx(logged.values[:50].mean())
    assert curve.steps[0] == pytest.approx(25.5)


def test_the_band_is_from_the_lowest_to_the_highest_seed():
    runs = [make_series((1, 1.0), (2, 4.0)), make_series((1, 3.0), (2, 2.0)), make_series((1, 5.0), (2, 3.0))]
    curve = build_curve(runs, divide_steps(runs, 1))
    assert curve.mean.tolist() == [3.0, 3.0]
    assert (curve.low.tolist(), curve.high.tolist()) == ([1.0, 2.0], [5.0, 4.0])


def test_with_ranges_the_inner_band_spans_means_and_the_outer_band_spans_values():
    runs = [make_series((1, 0.0), (2, 2.0)), make_series((1, 4.0), (2, 10.0))]
    curve = build_curve(runs, StepRanges(1, 2, 1))
    assert (curve.low[0], curve.high[0]) == (1.0, 7.0)
    assert (curve.lowest[0], curve.highest[0]) == (0.0, 10.0)
    assert curve.mean[0] == 4.0


def test_a_seed_that_ended_early_is_missing_and_not_zero():
    runs = [make_series((1, 2.0), (2, 2.0)), make_series((1, 4.0))]
    curve = build_curve(runs, divide_steps(runs, 1))
    assert curve.mean.tolist() == [3.0, 2.0] and curve.runs.tolist() == [2, 1]


def test_a_value_that_is_not_a_number_leaves_a_gap_and_is_marked():
    logged = make_series((1, 1.0), (2, math.nan), (3, 2.0))
    curve = build_curve([logged], divide_steps([logged], 1))
    assert np.isnan(curve.mean[1]) and curve.broken.tolist() == [1]


def test_a_value_that_is_not_a_number_is_marked_even_if_its_range_has_numbers():
    logged = make_series((1, 1.0), (2, math.nan), (3, 3.0), (4, 5.0))
    curve = build_curve([logged], StepRanges(1, 4, 2))
    assert curve.mean.tolist() == [1.0, 4.0] and curve.broken.tolist() == [0]


def test_without_any_number_there_is_no_curve():
    assert build_curve([make_series((1, math.nan))], StepRanges(1, 1, 1)) is None
    assert build_curve([Series(np.zeros(0, np.int64), np.zeros(0))], StepRanges(1, 1, 1)) is None


def test_a_running_mean_keeps_constants_and_gaps_and_returns_its_width():
    values = np.full(100, 2.0)
    values[40] = np.nan
    mean, width = smooth(values)
    assert width == 5
    assert np.isnan(mean[40]) and np.nanmax(np.abs(mean - 2.0)) < 1e-12


def test_a_running_mean_uses_both_sides():
    values = np.arange(100.0)
    mean, _ = smooth(values)
    assert mean[50] == 50.0 and mean[0] == 1.0


def test_ticks_are_round_and_inside():
    assert choose_ticks(0.0, 1.0, 4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert choose_ticks(4.05, 4.66, 4) == [4.2, 4.4, 4.6]
    assert choose_ticks(3.0, 3.0, 4) == [3.0]


@pytest.mark.parametrize(
    ("low", "high"),
    [(1e5, 1.01e5), (1e6, 1e6 + 10), (1e9, 1e9 + 3), (-2e7 - 5, -2e7), (0, 3e5), (1.2e-4, 1.21e-4), (0, 1e-14)],
)
def test_every_tick_is_labelled_with_its_own_number(low, high):
    ticks = choose_ticks(low, high, 5)
    assert len(ticks) > 2 and len(set(format_ticks(ticks))) == len(ticks)
    assert [float(label) for label in format_ticks(ticks)] == pytest.approx(ticks, abs=(ticks[1] - ticks[0]) / 100)


def test_ticks_are_as_short_as_their_distance_allows():
    assert format_ticks([0.0, 1e5, 2e5]) == ["0", "1e5", "2e5"]
    assert format_ticks([1e5, 100250.0, 100500.0]) == ["100000", "100250", "100500"]
    assert format_ticks([]) == []


def test_the_smallest_numbers_there_are_have_ticks():
    for high in (5e-324, 1e-322, 1e-310):
        assert len(choose_ticks(0.0, high, 4)) == 1


def test_a_logarithmic_scale_has_powers_of_ten_at_equal_distances():
    up = Scale(1e-6, 1.0, 100.0, 40.0, log=True)
    assert [round(up.at(value), 6) for value in (1e-6, 1e-3, 1.0)] == [100.0, 70.0, 40.0]
    assert choose_log_ticks(1e-6, 1.0, 4) == [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    assert choose_log_ticks(3.9, 31.0, 4) == [5.0, 10.0, 20.0]
    assert len(choose_log_ticks(1e-30, 1.0, 4)) <= 6


def test_shares_stay_within_0_and_1():
    assert pad_range([0.9, 1.0], share=True)[1] == 1.0
    assert pad_range([0.0, 0.0], share=True) == (0.0, 0.05)
    assert pad_range([0.0, 1.4], share=True)[1] > 1.4
    assert pad_range([-2.0, -1.0], share=True) == pytest.approx((-2.06, -0.94))


def test_numbers_have_four_significant_digits():
    values = (0.0, 0.5, 4.2051, 12345.6, 0.0000123, -0.25)
    assert [format_number(value) for value in values] == ["0", "0.500", "4.205", "12,346", "1.23e-5", "-0.250"]
    assert format_number(None) == format_number(math.nan) == "-"
    assert (format_tick(1e-4), format_tick(250000.0), format_tick(0.25)) == ("1e-4", "2.5e5", "0.25")
