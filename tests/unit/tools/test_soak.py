"""The slopes and the picture of the soak test (`benchmarks/soak.py`), without a server."""

import random
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def soak():
    sys.path.insert(0, str(FOLDER))  # it imports its neighbours
    import soak

    yield soak
    sys.path.remove(str(FOLDER))


def noisy(slope, count=70, level=800.0, noise=4.0):
    draws = random.Random(5)
    return [(20 * k, level + slope * 20 * k / 1000 + draws.gauss(0, noise)) for k in range(1, count + 1)]


def test_noise_has_no_slope_and_a_leak_of_10_kb_per_update_has_one(soak):
    assert soak.fit(noisy(0.0), is_time=False)["ok"]
    leak = soak.fit(noisy(10.0), is_time=False)  # MB per 1,000 updates
    assert not leak["ok"] and leak["low"] < 10 < leak["high"] and leak["drift"] == pytest.approx(0.017, abs=0.005)
    assert soak.fit(noisy(10.0), is_time=True)["ok"]  # times may drift by 5 %


def test_a_constant_is_flat_and_one_more_file_per_100_updates_is_not(soak):
    assert soak.fit([(k, 40) for k in range(20, 1400, 20)], is_time=False) == {
        "median": 40, "slope": 0.0, "low": 0.0, "high": 0.0, "drift": 0.0, "ok": True
    }  # fmt: skip
    assert not soak.fit([(k, 40 + k // 100) for k in range(20, 1400, 20)], is_time=False)["ok"]
