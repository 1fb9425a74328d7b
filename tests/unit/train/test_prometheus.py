"""The learner's metrics for Prometheus: a file that another process may read at any moment."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState

from coordexp.train.folder import ServerLog
from coordexp.train.prometheus import FILE, LearnerMetrics, to_prometheus

parser = pytest.importorskip("prometheus_client.parser")
ARGUMENTS = SimpleNamespace(world_size=3)


def read(folder: Path) -> dict[str, float]:
    """Read the file with Prometheus' own parser, and check that every sample names its run."""
    values = {}
    for family in parser.text_string_to_metric_families((folder / FILE).read_text()):
        (sample,) = family.samples
        assert sample.labels == {"run": str(folder)}
        values[sample.name.removeprefix("coordexp_learner_")] = sample.value
    return values


def call(callback: TrainerCallback, event: str, step: int, is_first: bool = True, **values: object) -> None:
    state = TrainerState(global_step=step, max_steps=50, is_world_process_zero=is_first)
    getattr(callback, event)(ARGUMENTS, state, TrainerControl(), **values)


def test_the_file_has_step_loss_time_and_samples_of_a_resumed_run(tmp_path):
    taken = iter([80, 80, 84, 92])  # before the run, and after each step; with packing, steps take more or less
    metrics, before = LearnerMetrics(tmp_path, lambda: next(taken)), time.time()
    call(metrics, "on_train_begin", 10)
    assert read(tmp_path)["step"] == 10 and read(tmp_path)["samples_total"] == 0
    call(metrics, "on_step_end", 11)
    call(metrics, "on_step_end", 12)
    call(metrics, "on_log", 12, logs={"loss": float("nan")})
    values = read(tmp_path)
    assert before <= values.pop("last_step_timestamp_seconds") <= time.time()
    assert str(values.pop("loss")) == "nan"
    assert values == {"running": 1, "step": 12, "max_steps": 50, "samples_total": (92 - 80) * 3}
    call(metrics, "on_train_end", 12)
    assert read(tmp_path)["running"] == 0


def take_none() -> int:
    return 0


def test_no_count_is_lost_when_several_threads_count(tmp_path):
    metrics, event = LearnerMetrics(tmp_path, take_none), {"event": "rollouts", "calls": [{"count": 1}]}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [metrics.count(event) for _ in range(5000)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    call(metrics, "on_train_begin", 0)
    assert read(tmp_path)["rollouts_total"] == 40000


def test_it_counts_what_servers_lost(tmp_path):
    metrics = LearnerMetrics(tmp_path, take_none)
    log = ServerLog(tmp_path, 0, metrics.count)
    call(metrics, "on_train_begin", 0)
    lost, made = {"server": 0, "count": 5, "lost": True}, {"server": 1, "count": 8}
    log(
        {
            "event": "sync",
            "servers": [],
            "sync_mode": "full",
            "fallbacks": [],
            "synced": [1],
            "failed": {"0": "slow"},
        }
    )
    log({"event": "rollouts", "calls": [lost, made]})
    log({"event": "rollouts", "calls": [made]})
    call(metrics, "on_step_end", 1)
    values = read(tmp_path)
    assert values["rollouts_lost_total"] == 5 and values["rollouts_total"] == 16
    assert values["servers"] == 1 and values["syncs_failed_total"] == 1


def test_other_ranks_write_nothing(tmp_path):
    call(LearnerMetrics(tmp_path, take_none), "on_train_begin", 0, is_first=False)
    assert not (tmp_path / FILE).exists()


def test_a_disk_that_takes_no_file_costs_the_file_and_not_the_run(tmp_path, capsys):
    metrics = LearnerMetrics(tmp_path / "no folder", take_none)
    call(metrics, "on_train_begin", 0)
    call(metrics, "on_step_end", 1)
    assert capsys.readouterr().err.count("metrics for Prometheus are not written") == 1


def test_the_name_of_a_run_is_escaped():
    text = to_prometheus({"step": 3}, 'a"b\\c')
    (family,) = parser.text_string_to_metric_families(text)
    assert family.samples[0].labels == {"run": 'a"b\\c'}
