"""Which checkpoint a run resumes from, and what is reported about the others."""

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordexp.errors import DataError, UserError
from coordexp.logs import say
from coordexp.train import checkpoints
from coordexp.train.checkpoints import (
    MANIFEST,
    SaveError,
    choose_checkpoint,
    clear,
    hold_folder,
    rotate,
    saving,
    sync_checkpoint,
    write_manifest,
)
from coordexp.train.sinks import cut_metrics
from tests import zygote
from tests.command import run

pytestmark = pytest.mark.timeout(60)
FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "global_step4/shard.pt")


def silent(message: str) -> None:
    """Drop messages that other tests check."""


def saved(run: Path, step: int) -> Path:
    """Write a checkpoint as a run does."""
    folder = run / f"checkpoint-{step}"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"{name} of step {step}".encode() * 50)
    (folder / "stream_0.json").write_text(json.dumps({"order": {"ranks": 1}}))
    sync_checkpoint(folder)
    write_manifest(folder, silent)
    return folder


def train_words(run: Path) -> list[str]:
    """Return the command of a run in a folder, whose files are all there, but empty."""
    (run / "train.jsonl").touch()
    paths = {"training.output_dir": run, "model.path": run}
    paths |= dict.fromkeys(("custom.train_jsonl", "custom.val_jsonl"), run / "train.jsonl")
    return [
        "train",
        "-c",
        "configs/demo/stage1-cpu.yaml",
        *(f"--set={name}={path}" for name, path in paths.items()),
    ]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "optimizer.pt": lambda folder: os.truncate(folder / "optimizer.pt", 9),
    "model.safetensors": lambda folder: flip(folder / "model.safetensors"),
    "global_step4/shard.pt": lambda folder: flip(folder / "global_step4/shard.pt"),
    "stream_0.json": lambda folder: os.truncate(folder / "stream_0.json", 0),
    "scheduler.pt": lambda folder: (folder / "scheduler.pt").unlink(),
    "checkpoint-8": lambda folder: (folder / MANIFEST).unlink(),
    "manifest.json": lambda folder: os.truncate(folder / MANIFEST, 40),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_newest_intact_one_is_taken(tmp_path, capsys, name):
    for step in (4, 8):
        saved(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    assert choose_checkpoint(tmp_path, True, say) == tmp_path / "checkpoint-8"
    assert capsys.readouterr().err == ""
    DAMAGES[name](tmp_path / "checkpoint-8")
    assert choose_checkpoint(tmp_path, True, say) == tmp_path / "checkpoint-4"
    shown = capsys.readouterr().err
    assert name in shown and "checkpoint-4" in shown
    DAMAGES[name](tmp_path / "checkpoint-4")
    if name != "checkpoint-8":  # not written to its end: may be from another program
        with pytest.raises(DataError, match=name) as raised:
            choose_checkpoint(tmp_path, True, say)
        assert raised.value.fix


def test_if_no_checkpoint_was_written_to_its_end_the_run_starts_from_the_beginning_with_a_warning(
    tmp_path, capsys
):
    for step in (4, 8):
        (saved(tmp_path, step) / "manifest.json").unlink()
    (tmp_path / "checkpoint-8/stream_0.json").unlink()
    with pytest.raises(DataError):  # they may be from another program
        choose_checkpoint(tmp_path, True, say)
    (tmp_path / "run.json").write_text("{}")
    assert choose_checkpoint(tmp_path, True, say) is None
    shown = capsys.readouterr().err
    assert "checkpoint-4" in shown and "checkpoint-8" in shown
    flip(saved(tmp_path, 12) / "model.safetensors")
    with pytest.raises(DataError):
        choose_checkpoint(tmp_path, True, say)


def test_a_new_run_does_not_take_a_folder_with_a_finished_checkpoint_and_reads_none(tmp_path, monkeypatch):
    assert choose_checkpoint(tmp_path, False, say) is None
    flip(saved(tmp_path, 4) / "model.safetensors")
    monkeypatch.setattr(checkpoints, "hash_files", None)
    with pytest.raises(DataError, match="already holds checkpoint-4"):
        choose_checkpoint(tmp_path, False, say)


def test_files_that_safetensors_makes_private_get_the_mode_of_the_others(tmp_path):
    folder = saved(tmp_path, 4)
    (folder / "model.safetensors").chmod(0o600)
    (folder / "stream_0.json").chmod(0o640)
    sync_checkpoint(folder)
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o640


def test_of_older_checkpoints_the_unfinished_go_first_and_other_folders_stay(tmp_path):
    for step in (2, 4, 8):
        saved(tmp_path, step)
    (tmp_path / "checkpoint-6").mkdir()  # was not written to its end
    (tmp_path / "checkpoint-best").mkdir()
    saved(tmp_path, 12)  # was passed over: the run goes on from an older one
    rotate(tmp_path / "checkpoint-8", 3, None)
    assert left(tmp_path) == ["checkpoint-12", "checkpoint-2", "checkpoint-4", "checkpoint-8", "checkpoint-best"]
    rotate(tmp_path / "checkpoint-8", 2, str(tmp_path / "checkpoint-2"))
    assert left(tmp_path) == ["checkpoint-12", "checkpoint-2", "checkpoint-8", "checkpoint-best"]
    rotate(tmp_path / "checkpoint-8", None, None)
    rotate(tmp_path / "checkpoint-8", 1, None)
    assert left(tmp_path) == ["checkpoint-12", "checkpoint-8", "checkpoint-best"]


def left(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_a_full_disk_at_a_save_says_what_to_do_and_what_to_go_on_from(tmp_path):
    saved(tmp_path, 4)
    (tmp_path / "checkpoint-8").mkdir()
    for older in (True, False):
        with pytest.raises(SaveError, match="checkpoint-8") as raised, saving(tmp_path / "checkpoint-8"):
            raise OSError(errno.ENOSPC, "No space left on device")
        assert ("--resume" in raised.value.fix and "checkpoint-4" in raised.value.fix) == older
        clear(tmp_path / "checkpoint-4")


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EDQUOT, "Disk quota exceeded"), RuntimeError("I/O error: File too large (os error 27)")],
)
def test_an_error_of_the_disk_gives_advice_about_the_disk(tmp_path, error):
    with pytest.raises(SaveError) as raised, saving(tmp_path / "checkpoint-8"):
        raise error
    assert "GB are free" in raised.value.fix


def test_verify_says_one_line_a_checkpoint_and_exits_by_the_newest(tmp_path):
    for step in (4, 8, 12):
        saved(tmp_path, step)
    (saved(tmp_path, 2) / MANIFEST).unlink()
    flip(tmp_path / "checkpoint-4/model.safetensors")
    result = run("verify", tmp_path)
    assert [line.split()[0] for line in result.stdout.splitlines()] == [f"checkpoint-{k}" for k in (12, 8, 4, 2)]
    assert f"{tmp_path}/checkpoint-4/model.safetensors" in result.stdout
    (tmp_path / "checkpoint-12" / MANIFEST).unlink()
    result = run("verify", tmp_path, code=1)
    assert result.stdout.startswith("checkpoint-12 ") and "manifest.json" in result.stdout


def lines(*steps: int) -> bytes:
    return b"".join(
        json.dumps({"step": step, "seconds": step / 2, "loss": 1.0}).encode() + b"\n" for step in steps
    )


@pytest.mark.parametrize("tail", [b"", b'{"step": 3, "sec', b"\0" * 512, b'{"step": 9}\0\0\n'])
def test_metrics_after_the_checkpoint_and_a_torn_last_line_are_dropped(tmp_path, capsys, tail):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(lines(1, 2, 2, 3) + tail)
    assert cut_metrics(file, 2) == 1.0
    assert file.read_bytes() == lines(1, 2, 2)
    assert ("torn" in capsys.readouterr().err) == bool(tail)
    assert cut_metrics(tmp_path / "nothing.jsonl", 2) == 0.0


@pytest.mark.parametrize("line", [b"{broken\n", b"[1]\n", b'{"loss": 1}\n', b"\0\0\n"])
def test_a_broken_line_of_the_metrics_is_named_with_a_way_out_and_nothing_is_changed(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    content = lines(1) + line + lines(2)
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"{file}, line 2: ") as raised:
        cut_metrics(file, 2)
    assert raised.value.fix
    assert file.read_bytes() == content


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_if_the_first_rank_refuses_a_folder_no_other_rank_waits_for_it(tmp_path):
    flip(saved(tmp_path, 4) / "model.safetensors")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = zygote.run([*torchrun, "-m", "coordexp", *train_words(tmp_path), "--resume"], cwd=Path.cwd())
    assert done.returncode == 1
    assert done.stderr.count(f"{tmp_path} ") == 1


HOLDER = """
import sys, os, time
from pathlib import Path
from coordexp.train.checkpoints import hold_folder
with hold_folder(Path(sys.argv[1]), print):
    child = os.fork()  # lives on when this process is killed, as an engine does for a moment
    print(child or "", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Start a process that holds the folder and forks another one."""
    words = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        children = [int(line) for line in (process.stdout.readline(), process.stdout.readline()) if line.strip()]
        yield process
        process.kill()
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_folder_that_a_run_holds_is_refused_with_process_and_host_until_that_run_is_killed(tmp_path, holder):
    with pytest.raises(UserError) as raised, hold_folder(tmp_path, say):
        pass
    assert f"process {holder.pid} on {platform.node()}" in raised.value.problem
    holder.kill()
    holder.wait()
    with hold_folder(tmp_path, say):
        assert (tmp_path / "run.lock").read_text() == f"process {os.getpid()} on {platform.node()}"


@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["plain", "resume"])
def test_train_refuses_a_folder_in_use_and_changes_nothing_in_it(tmp_path, holder, resume):
    words = train_words(tmp_path)
    before = sorted(tmp_path.iterdir())
    result = run(*words, *resume, code=1)
    assert f"process {holder.pid}" in result.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_on_a_file_system_without_locks_a_run_begins_with_a_warning(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    messages: list[str] = []
    with hold_folder(tmp_path, messages.append):
        pass
    assert len(messages) == 1 and "No locks available" in messages[0]
