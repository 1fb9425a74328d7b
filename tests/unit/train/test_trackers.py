"""A resumed run continues in the same place of its trackers. Both are real; wandb writes offline."""

import os
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerControl, TrainerState, TrainingArguments

from coordexp.errors import UserError
from coordexp.train.callbacks import WANDB_ID, TensorBoard, Wandb


def begin(tracker: Any, folder: Path, step: int) -> None:
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
    tracker.on_train_begin(arguments, TrainerState(global_step=step), TrainerControl())


def log(tracker: Any, folder: Path, step: int, loss: float) -> None:
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
    tracker.on_log(arguments, TrainerState(global_step=step), TrainerControl(), logs={"loss": loss})


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    module = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    module.teardown()
    yield module
    module.teardown()


def test_a_resumed_run_writes_to_the_same_folder_and_hides_the_steps_that_it_repeats(tmp_path):
    first = TensorBoard()
    begin(first, tmp_path, 0)
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
        log(first, tmp_path, step, loss)
    first.tb_writer.close()
    second = TensorBoard()
    begin(second, tmp_path, 2)
    log(second, tmp_path, 3, 30.0)
    second.tb_writer.close()
    (folder,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_run_that_begins_anew_has_a_folder_of_its_own(tmp_path):
    (tmp_path / "runs/old").mkdir(parents=True)
    (tmp_path / "runs/old/events.out.tfevents.1").touch()
    tracker = TensorBoard()
    begin(tracker, tmp_path, 0)
    tracker.tb_writer.close()
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # wandb leaves sockets open
@pytest.mark.timeout(180)
def test_a_resumed_run_continues_its_run_of_wandb_and_a_new_one_does_not(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")

    def start(step: int) -> str:
        begin(Wandb(), tmp_path, step)
        id = wandb.run.id
        wandb.finish()
        return id

    first = start(0)
    assert (tmp_path / WANDB_ID).read_text() == f"{first}\n"
    assert start(5) == first
    assert start(0) != first


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_wandb_without_a_key_is_an_error_with_a_way_out(wandb, tmp_path):
    with pytest.raises(UserError) as caught:
        begin(Wandb(), tmp_path, 0)
    assert caught.value.problem.startswith("training.report_to: wandb: ") and "WANDB_MODE" in caught.value.fix
