"""`coordexp doctor` with real engines, as a user runs it."""

import pytest

from tests.integration.stage2_runs import started

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.timeout(700)]

CHECKED = ("training", "colocated engine", "rollout server")


def states(shown):
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line[:1] == "│"]
    return {name: state for name, _, state in rows}


@pytest.mark.cold
def test_the_doctor_passes_all_checks_on_a_cpu_and_leaves_no_process():
    with started(["-m", "coordexp", "doctor", "--cpu"]) as run:
        code = run.wait(600)
        assert code == 0, run.shown[-5000:]
        assert states(run.shown) == dict.fromkeys(CHECKED, "ok")
        assert run.remains() == {}
