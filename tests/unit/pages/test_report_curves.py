"""From the logs of runs to the points of a chart: bounded in number, without hiding a value."""

import math

import numpy as np
import pytest

from coordexp.errors import DataError
from coordexp.pages.charts import choose_ticks, format_number, format_tick
from coordexp.pages.curves import (
    MAX_POINTS,
    Series,
    StepRanges,
    build_curve,
    collect_series,
    divide,
    divide_steps,
)
from tests.unit.pages.run_folders import make_series


@pytest.mark.parametrize(
    ("logged", "steps", "values"),
    [
        ([(1, None), (2, 1.0)], [1, 2], [math.nan, 1.0]),
        ([(1, math.inf), (2, -math.inf)], [1, 2], [math.nan] * 2),
        ([(1, 9.0), (2, 8.0), (1, 1.0)], [1, 2], [1.0, 8.0]),  # the last value of a step counts
    ],
)
def test_a_series_has_one_value_per_step_and_none_that_is_not_a_number(logged, steps, values):
    loss = collect_series([{"step": step, "loss": value} for step, value in logged], "m")["loss"]
    assert loss.steps.tolist() == steps
    np.testing.assert_equal(loss.values, values)


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


def test_many_steps_become_a_bounded_number_of_points_whose_band_covers_every_value():
    rng = np.random.default_rng(0)
    logged = Series(np.arange(1, 50 * MAX_POINTS + 1), rng.normal(size=50 * MAX_POINTS))
    curve = build_curve([logged], divide_steps([logged]))
    assert len(curve.steps) == MAX_POINTS
    assert curve.highest.max() == logged.values.max() and curve.lowest.min() == logged.values.min()
    assert curve.mean[0] == pytest.approx(logged.values[:50].mean())
    assert curve.steps[0] == pytest.approx(25.5)


NAN = math.nan


@pytest.mark.parametrize(
    ("runs", "ranges", "expected"),
    [
        ([[(1, 3.0), (5, 2.0), (9, 1.0)]], None, {"steps": [1, 5, 9], "mean": [3.0, 2.0, 1.0]}),
        # The band is from the lowest to the highest seed.
        (
            [[(1, 1.0), (2, 4.0)], [(1, 3.0), (2, 2.0)], [(1, 5.0), (2, 3.0)]],
            None,
            {"mean": [3.0, 3.0], "low": [1.0, 2.0], "high": [5.0, 4.0]},
        ),
        # With ranges, the inner band spans means and the outer band spans values.
        (
            [[(1, 0.0), (2, 2.0)], [(1, 4.0), (2, 10.0)]],
            StepRanges(1, 2, 1),
            {"low": [1.0], "high": [7.0], "lowest": [0.0], "highest": [10.0], "mean": [4.0]},
        ),
        # A seed that ended early is missing, and not zero.
        ([[(1, 2.0), (2, 2.0)], [(1, 4.0)]], None, {"mean": [3.0, 2.0]}),
        # A value that is not a number leaves a gap, and is marked also if its range has numbers.
        ([[(1, 1.0), (2, NAN), (3, 2.0)]], None, {"mean": [1.0, NAN, 2.0], "broken": [False, True, False]}),
        (
            [[(1, 1.0), (2, NAN), (3, 3.0), (4, 5.0)]],
            StepRanges(1, 4, 2),
            {"mean": [1.0, 4.0], "broken": [True, False]},
        ),
    ],
)
def test_a_curve_has_the_mean_the_bands_and_the_broken_values_of_its_runs(runs, ranges, expected):
    series = [make_series(*run) for run in runs]
    curve = build_curve(series, ranges or divide_steps(series))
    for name, values in expected.items():
        np.testing.assert_equal(getattr(curve, name).tolist(), values)


@pytest.mark.parametrize(
    ("low", "high"),
    [(1e5, 1.01e5), (1e6, 1e6 + 10), (1e9, 1e9 + 3), (-2e7 - 5, -2e7), (0, 3e5), (1.2e-4, 1.21e-4), (0, 1e-14)],
)
def test_every_tick_is_labelled_with_its_own_number(low, high):
    ticks = choose_ticks(low, high, 5)
    labels = [format_tick(tick) for tick in ticks]
    assert len(ticks) > 2 and [float(label.replace(",", "")) for label in labels] == ticks


def test_numbers_have_four_significant_digits():
    values = (0.0, 0.5, 4.2051, 12345.6, 0.0000123, -0.25)
    assert [format_number(value) for value in values] == ["0", "0.5", "4.205", "12,346", "1.23e-05", "-0.25"]
    assert format_number(None) == format_number(math.nan) == "-"
