"""The driver of the study: the configs of its runs, what is left to do for a run, and processes side by side."""

import sys

import pytest
import study
from study import ROOT, VARIANTS, Job, Study, write_config

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


@pytest.mark.parametrize(
    "given", [["--set", "training.seed=1"], ["--name", "mine"], ["--steps", "100", "--eval-every", "30"]]
)
def test_runs_that_could_be_confused_are_refused(few, monkeypatch, given):
    arguments = ["study.py", "run", "--out", str(few.folder), "--regime", "few", "--variant", "continued", *given]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(UserError):
        study.main()
    assert not list(few.folder.iterdir())
