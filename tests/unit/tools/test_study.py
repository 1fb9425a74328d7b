"""The study: the configs of its arms, what is left to do, and what an arm needs before it begins."""

import sys
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import average_weights
import frozen_rollouts
import pytest
import study
import torch
from safetensors.torch import load_file, save_file
from study import DEMO, EXAMPLE, ROOT, Cell, Study, describe_run, list_cells, list_needed
from study_arms import ARMS, BUILDS_ON, SELF_TRAINING, describe_arms, write_config
from study_data import SIZES, make_scenes

from coordexp.config import World, load_settings
from coordexp.errors import UserError
from coordexp.train.checkpoints import MANIFEST

TRIAL = SIZES["trial"]


@pytest.fixture
def cell(tmp_path, monkeypatch) -> Cell:
    """A cell of a study whose starts come from the model of the example."""
    monkeypatch.chdir(ROOT)
    study = Study(tmp_path / "study", TRIAL, EXAMPLE, trl=Path("python"))
    make_scenes(study.scenes, TRIAL)
    return Cell(study, "missing-50", 1)


def load(folder: Path, regime: str, arm: str):
    settings = (
        describe_run(folder, EXAMPLE, folder / "labels.jsonl", 60, seed=101) | describe_arms(regime, 60)[arm]
    )
    settings |= {"rollout_matching.rollout_backend": "hf"}  # `frozen` is known only where it is installed
    return load_settings(
        write_config(folder / "config.yaml", DEMO / "stage2-hf.yaml", settings), World(1)
    ).settings


@pytest.mark.parametrize("arm", describe_arms("missing-50", 60))
def test_every_arm_is_a_valid_config_that_begins_with_the_start(tmp_path, arm):
    settings = load(tmp_path, "missing-50", arm)
    assert settings.model.path == str(EXAMPLE) and settings.training.seed == 101
    assert settings.training.max_steps == {"equal-time": 165, "long": 1000}.get(arm, 60)
    assert settings.training.learning_rate == 1e-3
    without_rollouts = {"continued", "closing", "equal-time", *SELF_TRAINING}
    assert (settings.stage2.b_ratio == 0) == (arm in without_rollouts)


@pytest.mark.parametrize(
    ("regime", "extras", "weight"),
    [
        ("complete", "remove", 1.0),
        ("missing-30", "keep", 0.7),
        ("by-size", "keep", 0.5),
        ("federated", "keep", 0.5),
    ],
)
def test_the_recommended_settings_follow_from_the_share_of_labelled_objects(tmp_path, regime, extras, weight):
    policy = load(tmp_path, regime, "recommended").rollout_matching.correction
    assert (policy.extras, policy.closing_weight) == (extras, weight)
    assert (policy.duplicates, policy.insertion) == ("remove", "reading_order")


def test_all_arms_of_a_seed_begin_with_its_start_and_its_labels(cell):
    start = str(cell.find_model("start"))
    jobs = {arm: cell.plan(arm, ["test"]) for arm in ARMS}
    for arm, job in jobs.items():
        assert job.folder == cell.folder / arm
        if arm in describe_arms("missing-50", 2) or arm == "grpo":
            assert cell.find_model("start") / MANIFEST in job.needs
            config = job.folder / "config.yaml"
            assert start in (config.read_text() if config.exists() else " ".join(job.commands[0].words))
    labels = str(cell.study.scenes / "missing-50-1.jsonl")
    assert all(
        labels in (cell.folder / arm / "config.yaml").read_text() for arm in ("start", "closing", "offline")
    )
    assert "seed: 1\n" in (cell.folder / "start/config.yaml").read_text()
    assert "seed: 101\n" in (cell.folder / "closing/config.yaml").read_text()
    assert jobs["grpo"].commands[0].words[0] == "python" and "--ignore-unmatched" in jobs["grpo"].commands[0].words


def test_each_round_of_self_training_labels_with_the_one_before_and_trains_from_the_start(cell):
    for arm, teacher in zip(SELF_TRAINING, ("start", *SELF_TRAINING), strict=False):
        job = cell.plan(arm, ["test"])
        programs = [" ".join(command.words[3:5]) for command in job.commands]
        assert [program.split()[0] for program in programs] == ["predict", "data", "data", "train", "predict"]
        assert programs[1:3] == ["data suggest", "data complete"]
        assert cell.find_model(teacher) / MANIFEST in job.needs
        assert str(cell.find_model(teacher)) in job.commands[0].words
        config = (job.folder / "config.yaml").read_text()
        assert str(job.folder / "completed.jsonl") in config and str(cell.find_model("start")) in config


def test_what_is_complete_is_not_left_to_do_and_the_rest_is(cell):
    job = cell.plan("continued", ["test", "val"])
    for k, command in enumerate(job.commands):
        assert [one.is_done for one in job.commands] == [True] * k + [False] * (len(job.commands) - k)
        command.makes.parent.mkdir(parents=True)
        command.makes.write_text("{}")
    assert job.is_done and cell.plan("continued", ["test", "val"]).is_done


def test_the_base_goes_from_lesson_to_lesson_and_the_starts_come_from_it(tmp_path):
    study = Study(tmp_path, TRIAL)
    jobs = [*study.plan_base()]
    assert [job.folder.name for job in jobs] == ["random", "one", "few", "many"]
    for before, job in pairwise(jobs):
        assert job.needs == (before.commands[-1].makes,)
        assert str(before.commands[-1].makes.parent) in (job.folder / "config.yaml").read_text()
    assert study.before / MANIFEST == jobs[-1].commands[-1].makes
    make_scenes(study.scenes, TRIAL)
    assert Cell(study, "complete", 0).plan("start", []).needs == (study.before / MANIFEST,)


def test_arms_are_made_with_what_they_build_on_and_the_main_question_comes_first(tmp_path):
    assert list_needed(["self-training-3"]) == ["start", *SELF_TRAINING]
    assert list_needed(["interpolated", "closing"]) == ["start", "continued", "closing", "interpolated"]
    assert all(ARMS.index(base) < ARMS.index(arm) for arm, base in BUILDS_ON.items())
    cells = list_cells(Study(tmp_path, TRIAL), ["missing-50", "complete", "by-size", "federated"], [0, 1])
    expected = ["missing-50 0", "complete 0", "missing-50 1", "complete 1"]
    expected += ["by-size 0", "federated 0", "by-size 1", "federated 1"]
    assert [f"{cell.regime} {cell.seed}" for cell in cells] == expected


@pytest.mark.parametrize(
    "given",
    [
        ["--arms", "continued", "--set", "training.seed=1"],
        ["--arms", "continued", "--name", "mine"],
        ["--arms", "continued", "--name", "closing", "--set", "training.seed=1"],
        ["--arms", "interpolated", "--name", "mine", "--set", "training.seed=1"],
        ["--arms", "grpo"],
    ],
)
def test_runs_that_could_be_confused_or_cannot_be_made_are_refused(tmp_path, monkeypatch, given):
    monkeypatch.setattr(sys, "argv", ["study.py", "run", "--out", str(tmp_path / "study"), *given])
    with pytest.raises(UserError):
        study.main()
    assert not [*tmp_path.iterdir()]


def test_an_arm_with_other_settings_is_not_taken_for_the_one_that_has_begun(cell):
    cell.plan("closing", ["test"])
    changes = {"training.learning_rate": 3e-4}
    assert cell.plan("closing", ["test"], changes, "slow").folder.name == "slow"
    with pytest.raises(UserError) as error:
        cell.plan_arm("closing", changes, "closing")
    assert "training.learning_rate" in str(error.value)


def test_frozen_rollouts_are_found_if_installed_and_keep_the_weights_of_the_start(tmp_path):
    frozen_rollouts.install(tmp_path)
    (package,) = distributions(path=[str(tmp_path)])
    (entry,) = package.entry_points
    assert (entry.group, entry.name) == ("coordexp.rollout_backends", "frozen")
    settings = SimpleNamespace(
        model=SimpleNamespace(path=str(EXAMPLE)), rollout_matching=SimpleNamespace(decode_batch_size=4)
    )
    learner = SimpleNamespace(device=torch.device("cpu"), precision="float32", dtype="float32")
    backend = frozen_rollouts.make_backend(settings, SimpleNamespace(prompts=None, table=None), learner)
    before = {name: weight.clone() for name, weight in backend.model().state_dict().items()}
    backend.sync(lambda: iter([(name, weight + 1) for name, weight in before.items()]), version=3)
    assert backend.version == 3
    assert all(torch.equal(weight, before[name]) for name, weight in backend.model().state_dict().items())


def test_average_weights_writes_the_means_of_two_models(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in EXAMPLE.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(EXAMPLE / "model.safetensors")
    save_file(
        {name: 3 * weight for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"}
    )
    average_weights.main(EXAMPLE, other, tmp_path / "mean")
    means = load_file(tmp_path / "mean/model.safetensors")
    assert means.keys() == weights.keys()
    for name, mean in means.items():
        torch.testing.assert_close(mean, 2 * weights[name].float(), rtol=1e-2, atol=1e-6)
    assert (tmp_path / "mean/coordexp.json").is_file() and (tmp_path / "mean/tokenizer.json").is_file()
