"""Where the time went: phases that do not overlap and add up, and what servers did."""

import json
from dataclasses import astuple

import pytest

from coordexp.pages.curves import PHASES, share_of_step, total_by_phase
from coordexp.pages.report import render_report
from coordexp.pages.report_servers import note_servers_out, read_servers
from coordexp.pages.run_folder import group_runs, read_logged_run
from tests.unit.pages.run_folders import END, lines, make_run, write_run


def test_phases_and_rest_add_up_to_the_step_and_the_wall_to_the_run():
    totals = total_by_phase(make_run(lines(10)).log)
    assert totals["compute"] == 10 and totals["pictures"] == 2.5 and totals["rollout"] == 2.5
    assert sum(totals[name] for name in PHASES) == pytest.approx(10 * 1.5)
    assert sum(totals.values()) == pytest.approx(20.0)


def test_a_phase_that_is_absent_from_a_line_took_no_time():
    assert total_by_phase(make_run(lines(4, every=2)).log)["rollout"] == 0.5


def test_rest_is_never_negative():
    logged = [line | {"time/compute": 1.4} for line in lines(3)]
    assert total_by_phase(make_run(logged).log)["rest"] == 0.0


def test_a_run_that_timed_nothing_has_no_times():
    run = make_run([{"step": 1, "seconds": 1.0, "loss": 2.0}, END])
    assert total_by_phase(run.log) is None and share_of_step(run.log, "waited") is None


def test_the_page_has_seconds_per_step_and_shares_of_all_time(tmp_path):
    page = render_report([*group_runs([read_logged_run(write_run(tmp_path, lines(10)))])], "", [])
    assert '<tr><th scope="row">compute</th><td>1.000</td><td>50.0 %</td>' in page
    assert '<th scope="row">sync</th>' not in page, "a phase that took no time is not listed"


def servers(*addresses):
    return [{"base_url": address, "group_port": 1, "world_size": 1, "boot": "b"} for address in addresses]


def test_calls_answers_and_failures_are_counted_per_server(tmp_path):
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
    summary = read_servers(tmp_path)
    assert astuple(summary.servers[0]) == ("one", 2, 6, 0, 2, 0, set())
    assert astuple(summary.servers[1]) == ("two", 0, 0, 1, 1, 1, set())
    assert summary.failures == {"server 1: no answer": 1}


def sync_of(version, *synced, count=2):
    event = {"event": "sync", "seconds": 1.0, "bytes": 1, "failed": {}}
    return event | {"version": version, "servers": servers(*map(str, range(count))), "synced": list(synced)}


def write_events(folder, events):
    folder.mkdir(exist_ok=True)
    (folder / "servers.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_a_server_that_did_not_get_the_weights_of_a_step_was_out_in_it(tmp_path):
    """As in a run whose server was killed and came back too late: no call was lost and no sync failed."""
    synced = [(0, 1)] * 4 + [(0,)] * 11
    summary = read_servers(write_events(tmp_path, [sync_of(k, *servers) for k, servers in enumerate(synced)]))
    assert (summary.servers[1].lost, summary.servers[1].failed, len(summary.servers[1].out)) == (0, 0, 11)
    assert note_servers_out(summary, last=14) == ["server 1 was out in 10 steps from 5 to 14"]
    page = render_report([*group_runs([read_logged_run(write_run(tmp_path, lines(14)))])], "", [])
    assert (
        "<li>server 1 was out in 10 steps from 5 to 14</li>" in page
        and "<td>10 steps from 5 to 14</td></tr>" in page
    )
    assert page.count("<td>never</td></tr>") == 1


def test_a_server_that_returns_or_loses_a_call_is_out_in_these_steps_only(tmp_path):
    lost = {"event": "rollouts", "version": 9, "seconds": 1.0, "calls": [CALL | {"server": 1, "lost": True}]}
    events = [sync_of(0, 0, 1), sync_of(2, 0), sync_of(6, 0), sync_of(7, 0), sync_of(7, 1), sync_of(9, 0, 1), lost]
    summary = read_servers(write_events(tmp_path, events))
    assert summary.servers[1].out == {3, 7, 10}


def test_of_many_servers_that_were_out_the_worst_is_named(tmp_path):
    first = [sync_of(k, *range(60), count=64) for k in range(1, 4)]
    events = [sync_of(0, *range(64), count=64), *first, sync_of(4, *range(63), count=64)]
    (note,) = note_servers_out(read_servers(write_events(tmp_path, events)), last=9)
    assert note == "4 of 64 servers were out in some steps; server 63 in most: 4 steps from 2 to 5"


SYNC = {"event": "sync", "seconds": 1.0, "bytes": 1, "servers": [], "synced": [], "failed": {}}
CALL = {"server": 0, "base_url": "one", "count": 1}


def test_without_servers_there_is_no_summary(tmp_path):
    assert read_servers(tmp_path) is None
