"""The function that gets every checkpoint: in the background, one after the other, and without harm to the run."""

from pathlib import Path
from threading import Event

from coordexp.train.checkpoints import CheckpointHook
from tests.unit.config.trees import only_problem, stage1


def test_the_hook_runs_while_training_goes_on_and_the_next_one_waits_for_it():
    seen, may_end = [], Event()

    def upload(checkpoint: Path) -> None:
        seen.append(f"begin {checkpoint}")
        assert may_end.wait(20)
        seen.append(f"end {checkpoint}")

    hook = CheckpointHook(upload)
    hook.start(Path("checkpoint-1"))
    assert "end checkpoint-1" not in seen
    may_end.set()
    hook.start(Path("checkpoint-2"))
    hook.close()
    hook.close()
    assert seen == ["begin checkpoint-1", "end checkpoint-1", "begin checkpoint-2", "end checkpoint-2"]


def test_an_error_of_the_hook_is_a_warning(capsys):
    def upload(checkpoint: Path) -> None:
        raise PermissionError(13, "no such bucket")

    hook = CheckpointHook(upload)
    hook.start(Path("checkpoint-1"))
    hook.start(Path("checkpoint-2"))
    hook.close()
    warnings = capsys.readouterr().err.splitlines()
    assert [f"checkpoint-{k}" in line for k, line in enumerate(warnings, start=1)] == [True, True]


def test_a_hook_that_no_package_adds_is_refused():
    assert only_problem(stage1(custom__on_checkpoint="upload"))[0] == "custom.on_checkpoint"
