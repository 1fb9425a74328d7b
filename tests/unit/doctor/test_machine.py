"""The choice of GPUs to check, and the messages if there is nothing to check."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from coordexp.cli import app
from coordexp.doctor.machine import choose_cpu, choose_gpus
from coordexp.errors import EngineError
from coordexp.launch import preflight
from coordexp.launch.preflight import DeviceMemory, visible_gpus


def run(*words):
    return CliRunner().invoke(app, ["doctor", *words])


def test_without_a_gpu_the_message_says_how_to_check_without(monkeypatch):
    monkeypatch.setattr(preflight, "find_gpus", dict)
    result = run("--gpu")
    assert result.exit_code == 1
    assert "no GPU is visible" in result.output
    assert "coordexp doctor --cpu" in result.output


def test_gpus_that_the_shell_hides_are_not_used(monkeypatch):
    monkeypatch.setattr(preflight, "find_gpus", lambda: {0: DeviceMemory(1, 1), 1: DeviceMemory(1, 1)})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "no GPU is visible" in run("--gpu").output
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 3")
    assert visible_gpus([0, 1, 2, 3]) == [1, 3]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    assert visible_gpus([0, 1]) == [0, 1]


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
def test_server_and_learner_get_different_gpus(server, train, expected):
    machine = choose_gpus([0, 1, 2], server, train, quick=False)
    assert (machine.server_gpus, machine.train_gpu) == expected
    assert machine.servers and machine.colocates and machine.dtype == "bfloat16"


def test_with_one_gpu_only_the_colocated_engine_is_checked():
    for quick in (False, True):
        machine = choose_gpus([3], None, None, quick)
        assert (machine.servers, machine.colocates, machine.train_gpu) == (False, True, 3)
        assert "needs two GPUs" in machine.notes["rollout server"]


def test_quick_leaves_the_colocated_engine_out_and_says_so():
    machine = choose_gpus([0, 1], None, None, quick=True)
    assert machine.eager and not machine.colocates
    assert machine.notes == {"colocated engine": "not checked with --quick"}


@pytest.mark.parametrize(
    ("server", "train", "problem"),
    [
        ("7", None, "--server-gpus 7: the usable GPUs are 0, 1, 2"),
        ("one", None, "--server-gpus one"),
        ("0,0", None, "--server-gpus 0,0"),
        ("0", "0", "GPU 0 is given to both the server and the learner"),
        (None, "0,1", "only one learner is checked"),
        ("0,1,2", None, "only one server is checked"),
    ],
)
def test_an_impossible_choice_of_gpus_is_refused_with_a_fix(server, train, problem):
    with pytest.raises(EngineError, match=r"\n  give ") as error:
        choose_gpus([0, 1, 2], server, train, quick=False)
    assert problem in error.value.problem


def test_options_that_do_not_belong_together_are_refused():
    assert "two checks" in run("--gpu", "--cpu").output
    result = run("--cpu", "--server-gpus", "0")
    assert result.exit_code == 1 and "belong to --gpu" in result.output


def test_without_gpus_a_note_says_that_no_colocated_engine_is_checked():
    assert "--gpu" in choose_cpu().notes["colocated engine"]


def test_the_modules_that_decide_import_no_torch():
    code = "import coordexp.doctor.outcome, coordexp.doctor.machine, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_examination_names_a_larger_one():
    machines = [
        choose_cpu(),
        choose_gpus([0], None, None, quick=False),
        choose_gpus([0, 1], None, None, quick=False),
        choose_gpus([0, 1, 2], "0,1", "2", quick=False),
    ]
    tests = [machine.next_test for machine in machines]
    assert len(set(tests)) == len(tests)
    assert "with two GPUs" in tests[1] and "--server-gpus 0,1 --train-gpus 2" in tests[2]
    assert [len(machine.training_gpus) for machine in machines] == [0, 1, 2, 3]
