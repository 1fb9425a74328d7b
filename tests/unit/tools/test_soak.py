"""The slopes and the picture of the soak test (`benchmarks/soak.py`), without a server."""

import random
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
OF_PROCESSES = {"memory", "files", "threads", "cpu", "relative"}  # quantities that each process has


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


def sampled(soak, updates):
    """Return a run of 40 updates that was ended after `updates` of them."""
    names = (soak.HTTP, *soak.ROLES.values(), soak.CLIENT)
    run = soak.Soak(40, 400, 1)
    for update in range(1, updates + 1):
        own = {key: dict.fromkeys(names, 100.0 + update) for key in OF_PROCESSES}
        seen = {key: {soak.SEEN: 3.5} for key in ("update", "call", "health")} | {"load": {soak.MACHINE: 7.0}}
        place = {"update": update, "asked": 10 * update, "seconds": 1.0}
        run.samples.append({"at": place, "segments": {soak.HTTP: 3}, **own, **seen})
    return run


def test_the_picture_has_a_panel_per_quantity(soak):
    run = sampled(soak, 40)
    picture = soak.draw_picture(run)
    ElementTree.fromstring(picture)
    assert all(title in picture for title in soak.TITLES.values())
    assert {row["quantity"] for row in run.slopes() if row["ok"] is False} == OF_PROCESSES


def test_a_run_that_was_ended_early_shows_what_it_has(soak, capsys):
    assert soak.Soak(40, 400, 1).slopes() == []
    in_warm_up, later = sampled(soak, 11), sampled(soak, 25)
    assert in_warm_up.slopes() == [] and len(later.slopes()) == len(later.curves())
    for run in (in_warm_up, later):
        ElementTree.fromstring(soak.draw_picture(run))
        soak.show(run, run.slopes())
    shown = capsys.readouterr().out
    assert "11 of 40 updates, 110 requests" in shown and "25 of 40 updates, 250 requests" in shown
    assert "load average: 7.0 to 7.0, median 7.0" in shown and "no goal" in shown
