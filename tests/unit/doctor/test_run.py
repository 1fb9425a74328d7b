"""A series of checks: errors end it as text, nothing hangs, and what is left is found and ended."""

import os
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest

from coordexp.cli.doctor_machine import print_report
from coordexp.doctor.machine import the_cpu
from coordexp.doctor.outcome import Outcome
from coordexp.doctor.run import Check, Examination, Report
from coordexp.doctor.server import MARK
from coordexp.errors import EngineError


@pytest.fixture
def examination():
    return Examination(the_cpu(), lambda message: nullcontext())


def check(name, run, seconds=5.0):
    return Check(name, name, seconds, run)


def fails(error):
    def run():
        raise error

    return run


def states(examination):
    return {one.what: one.state for one in examination.outcomes}


def test_what_is_found_wrong_does_not_keep_the_rest_from_being_checked(examination):
    wrong, well = Outcome("parity", "1 of 8", "other answers"), Outcome("sync", "1 s")
    examination._series([check("parity", lambda: wrong), check("sync", lambda: well)])
    assert states(examination) == {"parity": "failed", "sync": "ok"}


@pytest.mark.parametrize("error", [EngineError("it is gone\n  start it"), RuntimeError("CUDA error: no device")])
def test_an_error_is_told_as_text_and_what_needs_it_is_not_checked(examination, error):
    examination._series([check("start", fails(error)), check("sync", lambda: Outcome("sync", ""))])
    assert states(examination) == {"start": "failed", "sync": "not checked"}
    assert str(error) in examination.outcomes[0].problem
    assert examination.outcomes[1].found == "since start failed"


def test_a_check_that_hangs_is_given_up_at_its_deadline(examination):
    never = threading.Event()
    examination._series([check("sync", never.wait, seconds=0.05)])
    never.set()
    assert examination.hung
    assert "not done after 0.05 s" in examination.outcomes[0].problem


def test_a_process_that_is_left_is_found_by_its_mark_and_ended(examination, monkeypatch):
    monkeypatch.setattr("coordexp.doctor.server.ENDING_S", 0.5)
    monkeypatch.setenv(MARK, "of this test")
    left = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1)
    left.stdout.readline()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, env=os.environ | {MARK: "another"})
    examination._nothing_left()
    assert left.wait(5) == -9 and other.poll() is None
    assert f"{left.pid} " in examination.outcomes[0].problem
    other.communicate()
    left.communicate()


def test_the_report_has_a_line_a_check_and_each_problem_in_full(capsys):
    problem = "the engine answers otherwise [token 3]\n  look at the dtype"
    report = Report((Outcome("parity", "x" * 200, problem), Outcome("sync", "1 s")), None, hung=False)
    print_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert any("parity" in line and "x" * 200 in line and "failed" in line for line in lines)
    assert lines[-2:] == ["parity: the engine answers otherwise [token 3]", "  look at the dtype"]
    assert not report.ok
