"""Where the time went: phases that do not overlap and add up."""

import pytest

from coordexp.pages.curves import PHASES, total_by_phase
from coordexp.pages.report import render_report
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
    assert total_by_phase(run.log) is None


def test_the_page_has_seconds_per_step_and_shares_of_all_time(tmp_path):
    page = render_report([*group_runs([read_logged_run(write_run(tmp_path, lines(10)))])], "", {})
    assert '<tr><th scope="row">compute</th><td>1.000</td><td>50.0 %</td>' in page
    assert '<th scope="row">sync</th>' not in page, "a phase that took no time is not listed"
