"""Which GPUs are checked, and what a user reads when there is nothing to check."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from coordexp.cli import app
from coordexp.doctor.machine import the_cpu, the_gpus, visible
from coordexp.errors import EngineError
from coordexp.launch import preflight
from coordexp.launch.memory import Device


def run(*words):
    return CliRunner().invoke(app, ["doctor", *words])


def test_without_a_gpu_it_says_so_and_how_to_check_on_the_cpu(monkeypatch):
    monkeypatch.setattr(preflight, "find_gpus", dict)
    result = run("--gpu")
    assert result.exit_code == 1
    assert "no GPU is visible" in result.output
    assert "coordexp doctor --cpu" in result.output


def test_gpus_that_the_shell_hides_are_not_used(monkeypatch):
    monkeypatch.setattr(preflight, "find_gpus", lambda: {0: Device(1, 1), 1: Device(1, 1)})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "no GPU is visible" in run("--gpu").output
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 3")
    assert visible([0, 1, 2, 3]) == [1, 3]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    assert visible([0, 1]) == [0, 1]


@pytest.mark.parametrize(
    ("server", "train", "expected"),
    [
        (None, None, ((0,), 1)),
        ("1", None, ((1,), 0)),
        (None, "0", ((1,), 0)),
        ("0,1", None, ((0, 1), 2)),
        ("2", "1", ((2,), 1)),
    ],
)
def test_server_and_learner_get_gpus_of_their_own(server, train, expected):
    machine = the_gpus([0, 1, 2], server, train, quick=False)
    assert (machine.server_gpus, machine.train_gpu) == expected
    assert machine.servers and machine.colocates and machine.dtype == "bfloat16"


def test_with_one_gpu_the_colocated_engine_is_checked_alone():
    for quick in (False, True):
        machine = the_gpus([3], None, None, quick)
        assert (machine.servers, machine.colocates, machine.train_gpu) == (False, True, 3)
        assert "needs two GPUs" in machine.notes["rollout server"]


def test_quick_leaves_the_colocated_engine_out_and_says_so():
    machine = the_gpus([0, 1], None, None, quick=True)
    assert machine.eager and not machine.colocates
    assert machine.notes == {"colocated engine": "not with --quick"}


@pytest.mark.parametrize(
    ("server", "train", "told"),
    [
        ("7", None, "--server-gpus 7: the GPUs that can be used are 0, 1, 2"),
        ("one", None, "--server-gpus one"),
        ("0,0", None, "--server-gpus 0,0"),
        ("0", "0", "GPU 0 is the server's and the learner's"),
        (None, "0,1", "one learner is checked"),
        ("0,1,2", None, "one server is checked"),
    ],
)
def test_gpus_that_cannot_be_are_refused_with_a_way_out(server, train, told):
    with pytest.raises(EngineError, match=r"\n  give ") as error:
        the_gpus([0, 1, 2], server, train, quick=False)
    assert told in str(error.value)


def test_options_that_do_not_belong_together_are_refused():
    assert "two checks" in run("--gpu", "--cpu").output
    result = run("--cpu", "--server-gpus", "0")
    assert result.exit_code == 1 and "belong to --gpu" in result.output


def test_the_cpu_says_that_it_checks_no_colocated_engine():
    assert "--gpu" in the_cpu().notes["colocated engine"]


def test_what_decides_imports_no_torch():
    code = "import coordexp.doctor.outcome, coordexp.doctor.machine, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
