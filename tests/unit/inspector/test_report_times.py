"""Where the time went: disjoint phases that add up, and what servers did."""

import json

import numpy as np
import pytest

from coordexp.errors import DataError
from coordexp.inspector.report import grouped
from coordexp.inspector.report.curves import Stretches
from coordexp.inspector.report.servers import read_fleet
from coordexp.inspector.report.times import PHASES, share_of_step, spent, totals_of
from tests.unit.inspector.run_folders import END, lines, logged, settings


def test_phases_and_rest_add_up_to_the_step_and_the_wall_to_the_run():
    totals = totals_of(logged(lines(10)).log)
    assert totals["compute"] == 10 and totals["pictures"] == 2.5 and totals["rollout"] == 2.5
    assert sum(totals[name] for name in PHASES) == pytest.approx(10 * 1.5)
    assert sum(totals.values()) == pytest.approx(20.0)


def test_a_line_counts_as_the_steps_that_it_is_the_mean_of():
    found = [
        {"step": 1, "seconds": 1.0, "loss": 1.0, "time/compute": 1.0, "time/step": 1.0},
        {"step": 10, "seconds": 20.0, "loss": 1.0, "time/compute": 2.0, "time/step": 2.0},
    ]
    assert totals_of(logged(found).log)["compute"] == 1.0 + 9 * 2.0


def test_a_phase_that_a_line_does_not_name_took_no_time():
    found = spent(grouped([logged(lines(4, every=2))])[0], Stretches(1, 4, 4))
    assert found.seconds[list(PHASES).index("rollout")].tolist() == [0.0, 0.25, 0.0, 0.25]
    assert found.edges.tolist() == [1.0, 1.5, 2.5, 3.5, 4.0]


def test_rest_is_never_below_nothing():
    found = [line | {"time/compute": 1.4} for line in lines(3)]
    assert totals_of(logged(found).log)["rest"] == 0.0


def test_seeds_are_averaged_column_by_column():
    slow = [line | {"time/compute": 3.0, "time/step": 3.5} for line in lines(6)]
    runs = [logged(lines(10)), logged(slow, tree=settings(seed=2), folder="runs/two")]
    compute = spent(grouped(runs)[0], Stretches(1, 10, 10)).seconds[list(PHASES).index("compute")]
    assert compute.tolist() == [2.0] * 6 + [1.0] * 4
    assert np.isfinite(compute).all()


def test_a_run_that_timed_nothing_has_no_times():
    run = logged([{"step": 1, "seconds": 1.0, "loss": 2.0}, END])
    assert totals_of(run.log) is None and share_of_step(run.log, "waited") is None
    assert spent(grouped([run])[0], Stretches(1, 1, 1)) is None


@pytest.mark.parametrize("step", [None, 0.0, -1.0])
def test_steps_that_took_no_time_have_no_times(step):
    run = logged([{"step": 1, "seconds": None, "loss": 2.0, "time/step": step}])
    assert spent(grouped([run])[0], Stretches(1, 1, 1)) is None


def test_a_line_of_step_0_is_of_no_step():
    found = [{"step": k, "seconds": 1.0 + k, "loss": 2.0, "time/step": 1.0} for k in (0, 1)]
    assert spent(grouped([logged(found[:1])])[0], Stretches(0, 0, 1)) is None
    assert spent(grouped([logged(found)])[0], Stretches(0, 1, 2)).steps.tolist() == [1.0]


def servers(*addresses):
    return [{"base_url": address, "group_port": 1, "world_size": 1, "boot": "b"} for address in addresses]


def test_calls_answers_and_failures_are_counted_by_server(tmp_path):
    sync = {
        "event": "sync",
        "seconds": 1.0,
        "bytes": 2_000_000,
        "servers": servers("one", "two"),
        "fallbacks": ["slow"],
    }
    calls = [
        {"server": 0, "count": 3, "base_url": "one"},
        {"server": 1, "count": 2, "base_url": "two", "lost": True},
    ]
    first = [
        sync | {"synced": [0, 1], "failed": {}},
        sync | {"seconds": 3.0, "synced": [0], "failed": {"1": "server 1: no answer\n more"}},
        {"event": "rollouts", "seconds": 2.0, "calls": calls},
    ]
    second = [{"event": "rollouts", "seconds": 4.0, "calls": calls[:1]}]
    for name, events in (("servers.jsonl", first), ("servers_1.jsonl", second)):
        (tmp_path / name).write_text("".join(json.dumps(event) + "\n" for event in events))
    found = read_fleet(tmp_path)
    one, two = found.servers
    assert (one.calls, one.answers, one.lost, one.synced, one.failed) == (2, 6, 0, 2, 0)
    assert (two.calls, two.answers, two.lost, two.synced, two.failed) == (0, 0, 1, 1, 1)
    assert found.why == (("server 1: no answer", 1),) and found.fallbacks == ("slow",)
    assert (found.sync_seconds, found.round_seconds, found.megabytes) == ((2.0, 3.0), (3.0, 4.0), 2.0)


def test_a_failure_without_words_is_counted_too(tmp_path):
    sync = {"event": "sync", "seconds": 1.0, "bytes": 1, "servers": servers("one"), "synced": []}
    (tmp_path / "servers.jsonl").write_text(json.dumps(sync | {"failed": {"0": ""}}) + "\n")
    assert read_fleet(tmp_path).why == (("no reason was given", 1),)


SYNC = {"event": "sync", "seconds": 1.0, "bytes": 1, "servers": [], "synced": [], "failed": {}}
CALL = {"server": 0, "base_url": "one", "count": 1}


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ({"event": "sync"}, "servers None"),
        (SYNC | {"seconds": "x"}, "seconds 'x'"),
        (SYNC | {"bytes": None}, "bytes None"),
        (SYNC | {"synced": ["0"]}, r"synced \['0'\]"),
        (SYNC | {"failed": {"x": "y"}}, "failed {'x': 'y'}"),
        (SYNC | {"failed": {"0": 3}}, "failed {'0': 3}"),
        (SYNC | {"servers": [{}]}, "base_url None"),
        (SYNC | {"fallbacks": 3}, "fallbacks 3"),
        ({"event": "rollouts", "seconds": 1.0, "calls": [CALL | {"server": [1]}]}, r"calls\[0\]: server \[1\]"),
        ({"event": "rollouts", "seconds": 1.0, "calls": [CALL | {"count": "y"}]}, r"calls\[0\]: count 'y'"),
    ],
)
def test_what_no_server_log_has_is_named_with_its_line(tmp_path, event, told):
    good = {"event": "rollouts", "seconds": 1.0, "calls": [CALL]}
    (tmp_path / "servers_1.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(event)}\n")
    with pytest.raises(DataError, match=rf"servers_1.jsonl, line 2.*: {told} is not what a run writes\n  "):
        read_fleet(tmp_path)


def test_without_servers_there_is_no_fleet(tmp_path):
    assert read_fleet(tmp_path) is None
