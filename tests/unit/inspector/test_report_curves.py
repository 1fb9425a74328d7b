"""From what runs logged to the points of a chart: bounded, and honest about every value."""

import math

import numpy as np
import pytest

from coordexp.errors import DataError
from coordexp.inspector.report.axes import Scale, labels, number, powers, roomy, tick, ticks
from coordexp.inspector.report.curves import MOST_POINTS, Stretches, curve, smoothed, stretches
from coordexp.inspector.report.series import Series, ratio, series_of
from tests.unit.inspector.run_folders import series


def test_each_name_has_the_steps_at_which_it_was_logged():
    found = series_of([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "eval_f1_50": 0.5}], "m")
    assert found["loss"].steps.tolist() == [1, 2]
    assert found["eval_f1_50"].steps.tolist() == [2]


def test_null_stays_as_a_value_that_is_no_number():
    found = series_of([{"step": 1, "loss": None}, {"step": 2, "loss": 1.0}], "m")["loss"]
    assert found.broken.tolist() == [1] and found.last == 1.0


def test_endless_values_are_no_numbers():
    found = series_of([{"step": 1, "loss": math.inf}, {"step": 2, "loss": -math.inf}], "m")["loss"]
    assert np.isnan(found.values).all()


def test_of_a_step_that_was_logged_twice_the_last_counts():
    found = series_of([{"step": 1, "loss": 9.0}, {"step": 2, "loss": 8.0}, {"step": 1, "loss": 1.0}], "m")["loss"]
    assert found.steps.tolist() == [1, 2] and found.values.tolist() == [1.0, 8.0]


@pytest.mark.parametrize(
    "line",
    [
        *({"loss": 1.0}, {"step": "1", "loss": 1.0}, {"step": 1, "loss": "much"}, {"step": 1, "loss": True}),
        *({"step": 1, "loss": 10**400}, {"step": 1, "loss": 1e308}, {"step": 1, "loss": -1e308}),
    ],
)
def test_a_line_that_no_run_writes_is_named(line):
    with pytest.raises(DataError, match=r"metrics.jsonl, line 1: \w+ .* is not a"):
        series_of([line], "metrics.jsonl")


def test_a_ratio_has_the_steps_that_both_have_and_none_of_nothing():
    found = ratio(series((1, 2.0), (2, 3.0), (4, 1.0)), series((2, 6.0), (3, 1.0), (4, 0.0)))
    assert found.steps.tolist() == [2] and found.values.tolist() == [0.5]


def test_few_steps_are_points_as_they_are():
    logged = series((1, 3.0), (5, 2.0), (9, 1.0))
    found = curve([logged], stretches([logged], 1))
    assert found.steps.tolist() == [1, 5, 9] and found.mean.tolist() == [3.0, 2.0, 1.0]


def test_ten_thousand_steps_are_two_hundred_points_that_hold_every_value():
    rng = np.random.default_rng(0)
    logged = Series(np.arange(1, 10_001), rng.normal(size=10_000))
    found = curve([logged], stretches([logged], 1))
    assert len(found) == MOST_POINTS
    assert found.highest.max() == logged.values.max() and found.lowest.min() == logged.values.min()
    assert found.mean[0] == pytest.approx(logged.values[:50].mean())
    assert found.steps[0] == pytest.approx(25.5)


def test_the_band_is_from_the_lowest_to_the_highest_seed():
    runs = [series((1, 1.0), (2, 4.0)), series((1, 3.0), (2, 2.0)), series((1, 5.0), (2, 3.0))]
    found = curve(runs, stretches(runs, 1))
    assert found.mean.tolist() == [3.0, 3.0]
    assert (found.low.tolist(), found.high.tolist()) == ([1.0, 2.0], [5.0, 4.0])


def test_with_stretches_the_inner_band_is_of_means_and_the_outer_of_values():
    runs = [series((1, 0.0), (2, 2.0)), series((1, 4.0), (2, 10.0))]
    found = curve(runs, Stretches(1, 2, 1))
    assert (found.low[0], found.high[0]) == (1.0, 7.0)
    assert (found.lowest[0], found.highest[0]) == (0.0, 10.0)
    assert found.mean[0] == 4.0


def test_a_seed_that_ended_early_is_missing_and_not_zero():
    runs = [series((1, 2.0), (2, 2.0)), series((1, 4.0))]
    found = curve(runs, stretches(runs, 1))
    assert found.mean.tolist() == [3.0, 2.0] and found.runs.tolist() == [2, 1]


def test_a_value_that_is_no_number_leaves_a_gap_and_is_marked():
    logged = series((1, 1.0), (2, math.nan), (3, 2.0))
    found = curve([logged], stretches([logged], 1))
    assert np.isnan(found.mean[1]) and found.broken.tolist() == [1]


def test_a_value_that_is_no_number_among_others_of_its_stretch_is_marked_too():
    logged = series((1, 1.0), (2, math.nan), (3, 3.0), (4, 5.0))
    found = curve([logged], Stretches(1, 4, 2))
    assert found.mean.tolist() == [1.0, 4.0] and found.broken.tolist() == [0]


def test_without_any_number_there_is_no_curve():
    assert curve([series((1, math.nan))], Stretches(1, 1, 1)) is None
    assert curve([Series(np.zeros(0, np.int64), np.zeros(0))], Stretches(1, 1, 1)) is None


def test_a_running_mean_keeps_constants_and_gaps_and_says_over_how_many():
    values = np.full(100, 2.0)
    values[40] = np.nan
    found, width = smoothed(values)
    assert width == 5
    assert np.isnan(found[40]) and np.nanmax(np.abs(found - 2.0)) < 1e-12


def test_a_running_mean_is_of_both_sides():
    values = np.arange(100.0)
    found, _ = smoothed(values)
    assert found[50] == 50.0 and found[0] == 1.0


def test_ticks_are_round_and_inside():
    assert ticks(0.0, 1.0, 4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(4.05, 4.66, 4) == [4.2, 4.4, 4.6]
    assert ticks(3.0, 3.0, 4) == [3.0]


@pytest.mark.parametrize(
    ("low", "high"),
    [(1e5, 1.01e5), (1e6, 1e6 + 10), (1e9, 1e9 + 3), (-2e7 - 5, -2e7), (0, 3e5), (1.2e-4, 1.21e-4), (0, 1e-14)],
)
def test_every_tick_is_labelled_with_its_own_number(low, high):
    found = ticks(low, high, 5)
    assert len(found) > 2 and len(set(labels(found))) == len(found)
    assert [float(label) for label in labels(found)] == pytest.approx(found, abs=(found[1] - found[0]) / 100)


def test_ticks_are_as_short_as_their_distance_allows():
    assert labels([0.0, 1e5, 2e5]) == ["0", "1e5", "2e5"]
    assert labels([1e5, 100250.0, 100500.0]) == ["100000", "100250", "100500"]
    assert labels([]) == []


def test_the_smallest_numbers_there_are_have_ticks():
    for high in (5e-324, 1e-322, 1e-310):
        assert len(ticks(0.0, high, 4)) == 1


def test_a_logarithmic_scale_has_powers_of_ten_at_equal_distances():
    up = Scale(1e-6, 1.0, 100.0, 40.0, log=True)
    assert [round(up.at(value), 6) for value in (1e-6, 1e-3, 1.0)] == [100.0, 70.0, 40.0]
    assert powers(1e-6, 1.0, 4) == [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    assert powers(3.9, 31.0, 4) == [5.0, 10.0, 20.0]
    assert len(powers(1e-30, 1.0, 4)) <= 6


def test_shares_stay_within_0_and_1():
    assert roomy([0.9, 1.0], share=True)[1] == 1.0
    assert roomy([0.0, 0.0], share=True) == (0.0, 0.05)
    assert roomy([0.0, 1.4], share=True)[1] > 1.4
    assert roomy([-2.0, -1.0], share=True) == pytest.approx((-2.06, -0.94))


def test_numbers_have_four_digits_that_count():
    values = (0.0, 0.5, 4.2051, 12345.6, 0.0000123, -0.25)
    assert [number(value) for value in values] == ["0", "0.500", "4.205", "12,346", "1.23e-5", "-0.250"]
    assert number(None) == number(math.nan) == "-"
    assert (tick(1e-4), tick(250000.0), tick(0.25)) == ("1e-4", "2.5e5", "0.25")
