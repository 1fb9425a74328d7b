"""A full disk costs metrics and TensorBoard events, not the run. A file that prevents a resume is named."""

import json
import time
from types import SimpleNamespace

import pytest

from coordexp.errors import DataError
from coordexp.train.callbacks import RETRY, MetricsFile, TensorBoard
from coordexp.train.folder import read_starts

pytestmark = pytest.mark.timeout(60)
STATE = SimpleNamespace(
    is_world_process_zero=True, global_step=0, is_hyper_param_search=False, trial_name=None, max_steps=3
)


def test_metrics_that_have_no_room_are_warned_of_once(tmp_path, capsys):
    """Writing to /dev/full fails as on a full disk."""
    file = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(file)
    metrics.on_train_begin(None, STATE, None)
    file.symlink_to("/dev/full")
    for _ in range(3):
        metrics.on_log(None, STATE, None, {"loss": 1.0})
    file.unlink()
    metrics.on_log(None, STATE, None, {"loss": float("nan")})
    shown = [line.split(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert (shown[0], shown[-1], len(shown)) == ("warning", "note", 3)
    assert json.loads(file.read_text())["loss"] is None


def test_tensorboard_without_room_is_warned_of_once_and_begins_a_new_file_later(tmp_path, capsys, monkeypatch):
    """TensorBoard writes in a thread, whose traceback is not shown either."""
    arguments = SimpleNamespace(output_dir=str(tmp_path), to_json_string=lambda: "{}")
    board = TensorBoard()
    board.logging_dir = str(tmp_path / "runs")
    board.on_train_begin(arguments, STATE, None)
    (file,) = (tmp_path / "runs").iterdir()
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "full").replace(file)
    monkeypatch.setattr("socket.gethostname", lambda: "same")  # the names of later files
    for _ in range(3):
        board.on_log(arguments, STATE, None, logs={"loss": 1.0})
    assert len(list((tmp_path / "runs").iterdir())) == 1  # it is too early for another attempt
    clock = time.monotonic
    monkeypatch.setattr("time.monotonic", lambda: clock() + RETRY)
    board.on_log(arguments, STATE, None, logs={"loss": 1.0})
    board.on_train_end(arguments, STATE, None)
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert [line.split(":")[0] for line in shown.splitlines()] == ["warning", "note"]
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.parametrize("content", ["", '[{"command"', "{}", "[1]", "\0\0\0"])
def test_a_run_json_that_cannot_be_read_is_named_with_a_way_out(tmp_path, content):
    file = tmp_path / "run.json"
    file.write_text(content)
    with pytest.raises(DataError, match=str(file)) as raised:
        read_starts(file)
    assert raised.value.fix
