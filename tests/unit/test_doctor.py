"""`coordexp doctor --gpu` and `--cpu`: the choice of GPUs, and what is said of runs that fail or never end."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest

from coordexp import doctor
from coordexp.doctor import STEPS, Devices, choose_gpus, try_devices
from coordexp.errors import EngineError
from coordexp.launch import preflight
from coordexp.launch.preflight import DeviceMemory, visible_gpus
from tests.command import run


def test_without_a_gpu_the_message_says_how_to_check_without(monkeypatch):
    monkeypatch.setattr(preflight, "find_gpus", dict)
    result = run("doctor", "--gpu", code=1)
    assert "coordexp doctor --cpu" in result.output


def test_gpus_that_the_shell_hides_are_not_used(monkeypatch):
    monkeypatch.setattr(preflight, "find_gpus", lambda: {0: DeviceMemory(1, 1), 1: DeviceMemory(1, 1)})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "no GPU is visible" in run("doctor", "--gpu", code=1).output
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 3")
    assert visible_gpus([0, 1, 2, 3]) == [1, 3]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    assert visible_gpus([0, 1]) == [0, 1]


@pytest.mark.parametrize(
    ("gpus", "server", "train", "expected"),
    [
        ((0, 1, 2), None, None, ((0,), (1,))),
        ((0, 1, 2), "1", None, ((1,), (0,))),
        ((0, 1, 2), None, "0", ((1,), (0,))),
        ((0, 1, 2), "0,1", None, ((0, 1), (2,))),
        ((0, 1, 2), "2", "1,0", ((2,), (1, 0))),
        ((3,), None, None, ((), (3,))),
    ],
)
def test_server_and_learners_get_different_gpus(gpus, server, train, expected):
    assert choose_gpus(gpus, server, train) == Devices(*expected)


@pytest.mark.parametrize(("server", "train"), [("7", None), ("one", None), ("0", "0")])
def test_an_impossible_choice_of_gpus_is_refused_with_a_fix(server, train):
    with pytest.raises(EngineError) as error:
        choose_gpus([0, 1, 2], server, train)
    assert error.value.fix


ON_CPU = Devices()
NAMES = ["training", "colocated engine", "rollout server"]


@pytest.fixture
def try_command(monkeypatch, tmp_path):
    """Return a function that runs all checks with another command in place of theirs, each with these losses."""
    make_checks = doctor._make_checks

    def start(command, losses=(1.0,) * STEPS, devices=ON_CPU):
        def replace_commands(devices, folder):
            for check in make_checks(devices, folder):
                run = check.config.with_suffix("")
                run.mkdir()
                (run / "metrics.jsonl").write_text("".join(f"{json.dumps({'loss': loss})}\n" for loss in losses))
                sync = {"event": "sync", "bytes": 2_000_000, "seconds": 0.5}
                (run / "servers.jsonl").write_text(json.dumps(sync) + "\n")
                yield replace(check, command=(command,))

        monkeypatch.setattr(doctor, "_write_inputs", lambda folder: None)
        monkeypatch.setattr(doctor, "_make_checks", replace_commands)
        monkeypatch.setattr(doctor.tempfile, "tempdir", str(tmp_path))
        return try_devices(devices, lambda doing: nullcontext())

    return start


@pytest.mark.slow
def test_the_configs_are_valid_and_runs_that_pass_leave_no_files(try_command, tmp_path):
    outcomes, folder = try_command("check")
    assert [(outcome.check, outcome.state) for outcome in outcomes] == [(name, "ok") for name in NAMES]
    assert "2.00 MB in 0.500 s" in outcomes[-1].measured
    assert folder is None and not any(tmp_path.iterdir())


@pytest.mark.slow
def test_with_one_gpu_the_server_is_not_checked(try_command):
    outcomes, _ = try_command("check", devices=Devices(learners=(3,)))
    assert [outcome.state for outcome in outcomes] == ["ok", "ok", "not checked"]


def test_the_last_lines_of_a_command_that_fails_are_shown_and_the_rest_is_not_tried(try_command):
    outcomes, folder = try_command("no-such-command")
    assert [outcome.state for outcome in outcomes] == ["failed", "not checked", "not checked"]
    assert "exit code 2" in outcomes[0].problem and "  | " in outcomes[0].problem and outcomes[0].fix
    assert (folder / "training.yaml").is_file()


@pytest.mark.parametrize("losses", [(7.2,) * (STEPS - 1), (7.2,) * (STEPS - 1) + (math.nan,)])
def test_a_run_must_have_a_finite_loss_for_every_step(try_command, losses):
    outcomes, _ = try_command("check", losses)
    assert outcomes[0].state == "failed"


def test_a_command_that_does_not_end_is_ended(try_command, monkeypatch):
    monkeypatch.setattr(doctor, "MOST_S", 0.05)
    outcomes, _ = try_command("check")
    assert outcomes[0].state == "failed" and "0.05 s" in outcomes[0].problem
