"""The choice of GPUs to check, and the messages if there is nothing to check."""

import pytest
from typer.testing import CliRunner

from coordexp.cli import app
from coordexp.doctor.machine import choose_gpus
from coordexp.errors import EngineError
from coordexp.launch import preflight
from coordexp.launch.preflight import DeviceMemory, visible_gpus


def run(*words):
    return CliRunner().invoke(app, ["doctor", *words])


def test_without_a_gpu_the_message_says_how_to_check_without(monkeypatch):
    monkeypatch.setattr(preflight, "find_gpus", dict)
    result = run("--gpu")
    assert result.exit_code == 1
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


@pytest.mark.parametrize(
    ("server", "train"),
    [("7", None), ("one", None), ("0,0", None), ("0", "0"), (None, "0,1"), ("0,1,2", None)],
)
def test_an_impossible_choice_of_gpus_is_refused_with_a_fix(server, train):
    with pytest.raises(EngineError) as error:
        choose_gpus([0, 1, 2], server, train, quick=False)
    assert error.value.fix
