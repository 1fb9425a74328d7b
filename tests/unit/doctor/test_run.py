"""A series of checks: an error ends it with a message, nothing hangs, and left processes are found and killed."""

import os
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest

from coordexp.doctor.machine import CheckOutcome, choose_cpu
from coordexp.doctor.run import Check, Examination
from coordexp.doctor.server import MARK
from coordexp.errors import EngineError


@pytest.fixture
def examination():
    return Examination(choose_cpu(), nullcontext)


def check(name, run, seconds=5.0):
    return Check(name, name, seconds, run)


def failing(error):
    """Return the work of a check that raises this error."""

    def run():
        raise error

    return run


def states(examination):
    return {outcome.check: outcome.state for outcome in examination.outcomes}


def test_after_a_check_that_finds_a_problem_the_rest_is_still_checked(examination):
    wrong, fine = CheckOutcome("parity", "1 of 8", "other answers"), CheckOutcome("sync", "1 s")
    examination._run_series([check("parity", lambda: wrong), check("sync", lambda: fine)])
    assert states(examination) == {"parity": "failed", "sync": "ok"}


@pytest.mark.parametrize(
    ("error", "problem", "fix"),
    [
        (EngineError("it is gone", "start it"), "it is gone", "start it"),
        (RuntimeError("CUDA error: no device"), "RuntimeError: CUDA error: no device", ""),
    ],
    ids=["with a fix", "without"],
)
def test_an_error_is_reported_and_the_checks_that_depend_on_it_are_not_made(examination, error, problem, fix):
    series = [check("start", failing(error)), check("sync", lambda: CheckOutcome("sync", ""))]
    examination._run_series(series)
    assert states(examination) == {"start": "failed", "sync": "not checked"}
    assert (examination.outcomes[0].problem, examination.outcomes[0].fix) == (problem, fix)
    assert examination.outcomes[1].measured == "since start failed"


def test_a_check_that_hangs_is_given_up_at_its_deadline(examination):
    never = threading.Event()
    examination._run_series([check("sync", never.wait, seconds=0.05)])
    never.set()
    assert examination.hung
    assert "0.05 s" in examination.outcomes[0].problem


def test_a_left_process_is_found_by_its_mark_and_killed(examination, monkeypatch):
    monkeypatch.setattr("coordexp.doctor.server.ENDING_S", 0.5)
    monkeypatch.setenv(MARK, "of this test")
    left = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1)
    left.stdout.readline()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, env=os.environ | {MARK: "another"})
    examination._end_left_processes()
    assert left.wait(5) == -9 and other.poll() is None
    assert f"{left.pid} " in examination.outcomes[0].problem
    other.communicate()
    left.communicate()
