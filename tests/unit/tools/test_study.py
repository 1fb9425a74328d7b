"""The driver of the study: the configs of its runs, what is left to do for a run, and processes side by side."""

import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest
import study
import yaml
from study import ROOT, VARIANTS, Job, Study, lock_log, run_jobs, write_config

from coordexp.config import World, load_settings
from coordexp.errors import UserError

NUMBERS = {"steps": 100, "eval_every": 50}


@pytest.fixture
def few(tmp_path, monkeypatch) -> Study:
    """A study of the regime whose start needs no training."""
    monkeypatch.chdir(ROOT)
    return Study(tmp_path, "few")


def pretend_result(job: Job, steps: int) -> None:
    """Write the checkpoint that the job's run would leave."""
    folder = job.log.with_suffix("") / f"checkpoint-{steps}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("regime", ["few", "crowded"])
def test_every_variant_is_a_valid_config(tmp_path, name, regime):
    plan = Study(tmp_path, regime).describe_run(tmp_path / "run", seed=1, **NUMBERS)
    file = write_config(tmp_path / "run", study.STAGE2_CONFIG, plan | VARIANTS[name])
    settings = load_settings(file, World(1)).settings
    assert settings.training.seed == 101 and settings.training.max_steps == 100
    assert settings.custom.val_jsonl == str(tmp_path / regime / "data/val.jsonl")


@pytest.mark.parametrize(
    ("regime", "extras", "weight"),
    [
        ("complete", "remove", 1.0),
        ("missing-30", "keep", 0.7),
        ("missing-70", "keep", 0.3),
        ("federated", "keep", 0.5),
        ("digits-missing-50", "keep", 0.5),
    ],
)
def test_the_recommended_settings_follow_from_the_share_of_labelled_objects(tmp_path, regime, extras, weight):
    recommended = Study(tmp_path, regime).choose_settings("recommended")
    settings = load_settings(write_config(tmp_path / "run", study.STAGE2_CONFIG, recommended), World(1)).settings
    policy = settings.rollout_matching.correction
    assert (policy.extras, policy.closing_weight) == (extras, weight)
    assert (policy.duplicates, policy.insertion) == ("remove", "reading_order")


def test_continued_uses_no_rollouts(tmp_path):
    settings = load_settings(write_config(tmp_path / "run", study.STAGE2_CONFIG, VARIANTS["continued"]), World(1))
    assert settings.settings.stage2.b_ratio == 0


def test_a_module_of_the_objective_can_be_changed(tmp_path):
    changes = {"objective.token_ce.desc_ce_weight": 0.0, "objective.token_ce.weight": 0.5}
    file = write_config(tmp_path / "run", study.STAGE2_CONFIG, VARIANTS["continued"] | changes)
    before, after = (
        {
            module.name: module
            for module in load_settings(path, World(1)).settings.rollout_matching.pipeline.objective
        }
        for path in (study.STAGE2_CONFIG, file)
    )
    assert after["token_ce"].config.desc_ce_weight == 0 and after["token_ce"].weight == 0.5
    assert after["token_ce"].config.struct_ce_weight == before["token_ce"].config.struct_ce_weight
    assert after["coord_reg"] == before["coord_reg"]


def test_a_number_with_an_exponent_is_a_number():
    assert study.parse_setting("training.learning_rate=3e-4") == ("training.learning_rate", 3e-4)
    assert study.parse_setting("stage2.b_ratio=null") == ("stage2.b_ratio", None)


def test_a_run_trains_then_answers_and_evaluates_the_test_images(few):
    job = few.plan_run("continued", 0, VARIANTS["continued"], **NUMBERS)
    assert [command[0] for command in job.commands] == ["train", "predict", "evaluate"]
    config = yaml.safe_load((few.folder / "few/steps-100/continued-0.yaml").read_text())
    assert config["model"]["path"] == "examples/stage2-cpu/model"
    assert str(few.data / "test.jsonl") in job.commands[1] and str(few.data / "test.jsonl") in job.commands[2]


def test_the_model_before_the_start_answers_the_test_images_once(tmp_path):
    missing = Study(tmp_path, "missing-50")
    job = missing.plan_before_start()
    predict, evaluate = job.commands
    assert predict[0] == "predict" and predict[predict.index("--model") + 1] == str(study.MODEL)
    assert str(missing.data / "test.jsonl") in predict and evaluate[0] == "evaluate"
    report = tmp_path / "missing-50/before-start/test/report.json"
    assert str(report) in evaluate
    report.parent.mkdir(parents=True)
    report.write_text("{}")
    assert missing.plan_before_start() is None
    assert Study(tmp_path, "few").plan_before_start() is None, "its start is that model"


def test_nothing_complete_is_repeated(few):
    job = few.plan_run("continued", 0, VARIANTS["continued"], **NUMBERS)
    pretend_result(job, 50)
    job = few.plan_run("continued", 0, VARIANTS["continued"], **NUMBERS)
    assert job.commands[0][:2] == ("train", "--resume")
    pretend_result(job, 100)
    job = few.plan_run("continued", 0, VARIANTS["continued"], **NUMBERS)
    assert [command[0] for command in job.commands] == ["predict", "evaluate"]
    assert few.plan_run("continued", 0, VARIANTS["continued"], **NUMBERS, test=False) is None
    report = job.log.with_suffix("") / "test/report.json"
    report.parent.mkdir()
    report.write_text("{}")
    assert few.plan_run("continued", 0, VARIANTS["continued"], **NUMBERS) is None


def test_a_run_that_began_with_other_settings_is_not_continued(few):
    few.plan_run("continued", 0, VARIANTS["continued"], **NUMBERS)
    with pytest.raises(UserError, match=r"training\.learning_rate"):
        few.plan_run("continued", 0, VARIANTS["continued"] | {"training.learning_rate": 1e-5}, **NUMBERS)


def test_answers_with_other_options_are_runs_of_their_own(few):
    numbers = {"steps": 100, "splits": ["test", "val"], "options": ["--dedup", "0.5"]}
    with pytest.raises(UserError, match="does not exist"):
        few.plan_answers("dedup", 0, "continued", **numbers)
    pretend_result(few.plan_run("continued", 0, VARIANTS["continued"], **NUMBERS), 100)
    job = few.plan_answers("dedup", 0, "continued", **numbers)
    assert [command[0] for command in job.commands] == ["predict", "evaluate"] * 2
    assert job.commands[0][-2:] == ("--dedup", "0.5")
    assert str(few.folder / "few/steps-100/continued-0/checkpoint-100") in job.commands[0]
    assert str(few.folder / "few/steps-100/dedup-0/val/preds.json") in job.commands[2]


def test_the_start_on_complete_labels_is_that_of_another_regime(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(study, "make_start", lambda study, *numbers: started.append((study.regime, *numbers)))
    arguments = ["study.py", "start", "--out", str(tmp_path), "--regime", "missing-50", "--labels", "complete"]
    monkeypatch.setattr(sys, "argv", arguments)
    study.main()
    assert started == [("complete", 700, 700)]


@pytest.mark.parametrize(
    "given", [["--set", "training.seed=1"], ["--name", "mine"], ["--steps", "100", "--eval-every", "30"]]
)
def test_runs_that_could_be_confused_are_refused(few, monkeypatch, given):
    arguments = ["study.py", "run", "--out", str(few.folder), "--regime", "few", "--variant", "continued", *given]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(UserError):
        study.main()
    assert not list(few.folder.iterdir())


def test_a_job_that_fails_does_not_stop_the_others(tmp_path):
    wrong = Job("wrong", tmp_path / "wrong.log", (("no-such-command",), ("--help",)))
    right = [Job(name, tmp_path / f"{name}.log", (("--help",),)) for name in ("first", "second")]
    with pytest.raises(UserError, match="1 of 3 failed") as error:
        run_jobs([wrong, *right], 2)
    assert "wrong.log" in error.value.fix and "first.log" not in error.value.fix
    assert "No such command" in wrong.log.read_text()
    assert all("Usage" in job.log.read_text() for job in right)


def test_a_run_that_another_process_makes_is_left_alone(tmp_path):
    busy, free = (Job(name, tmp_path / f"{name}.log", (("--help",),)) for name in ("busy", "free"))
    with busy.log.open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process makes busy"):
            run_jobs([busy, free], 1)
    assert not busy.log.read_text() and "Usage" in free.log.read_text()
    run_jobs([busy], 1)
    assert "Usage" in busy.log.read_text()


SLOW_JOB = """
import signal, sys
from pathlib import Path
from study import Job, exit_on_signal, run_jobs

signal.signal(signal.SIGTERM, exit_on_signal)
folder = Path(sys.argv[1])
command = ("demo", "scenes", "--out", str(folder / "scenes"), "--train", "100000")
run_jobs([Job("slow", folder / "slow.log", (command,))], 1)
"""


@pytest.mark.timeout(180)
def test_a_signal_stops_the_processes_of_the_study(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tools")])}
    with subprocess.Popen([sys.executable, "-c", SLOW_JOB, str(tmp_path)], env=environment) as process:
        while not list(tmp_path.glob("scenes/images/train/*.png")):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    with lock_log(tmp_path / "slow.log") as log:  # no process of the job is left
        assert log is not None
