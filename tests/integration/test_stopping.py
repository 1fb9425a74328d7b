"""Signals to real runs: during an evaluation, during a save, and twice. On a tiny model whose answers never
end."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from coordexp.train.stopping import SAME
from tests.integration.stage1_runs import config, make_parts
from tests.integration.stage2_runs import ROOT, Started, metrics, started, training

pytestmark = pytest.mark.timeout(480)
HELD_OUT = 120


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return make_parts(tmp_path_factory.mktemp("stopped"), held_out=HELD_OUT)


def evaluating(parts: Path, name: str, at_once: int, **changes: object) -> Path:
    """Write the config of a run of six steps whose evaluation after the third takes minutes."""
    file = config(parts, name, max_steps=6, save_steps=100, eval_strategy="steps", eval_steps=3, **changes)
    tree = yaml.safe_load(file.read_text())
    tree["rollout_matching"] |= {"decode_batch_size": at_once, "max_new_tokens": 1500}
    file.write_text(yaml.safe_dump(tree))
    return file


def wait_until(run: Started, true: Callable[[], bool], seconds: float = 120) -> float:
    """Wait until it is true, and return how long it took."""
    since = time.monotonic()
    while not true():
        assert run.process.poll() is None and time.monotonic() - since < seconds, run.shown[-3000:]
        time.sleep(0.02)
    return time.monotonic() - since


def test_a_second_signal_ends_the_run_at_once(parts):
    file = config(parts, "twice", max_steps=6, save_steps=2)
    with started([str(ROOT / "tests/integration/slow_save_worker.py"), str(file), "60"]) as run:
        checkpoint = parts / "twice/checkpoint-2"
        wait_until(run, lambda: (checkpoint / "trainer_state.json").is_file())
        os.kill(run.process.pid, signal.SIGINT)
        wait_until(run, lambda: "again to end at once, without saving" in run.shown, 5)
        os.kill(run.process.pid, signal.SIGTERM)  # at the same time: a scheduler and torchrun may both send one
        time.sleep(SAME + 0.2)
        assert run.process.poll() is None and run.shown.count("stopping") == 1
        os.kill(run.process.pid, signal.SIGINT)
        assert run.wait(3) == 130, run.shown[-3000:]
        assert "SIGINT: ended at once, without saving" in run.shown
    assert not (checkpoint / "stream_0.json").exists()


def test_a_signal_to_one_rank_abandons_the_evaluation_of_all(parts):
    file = evaluating(parts, "ranks", at_once=2)
    with started(training(file), processes=2) as run:
        wait_until(run, lambda: "evaluating" in run.shown)
        os.kill(run.rank(1), signal.SIGTERM)
        assert run.wait(60) == 0, run.shown[-3000:]
        assert "stopped by a signal after step 3, which is saved; --resume continues" in run.shown
        assert not run.remains()
    assert all((parts / f"ranks/checkpoint-3/stream_{rank}.json").is_file() for rank in (0, 1))
    assert not (parts / "ranks/evaluations").exists()


def test_a_signal_while_a_checkpoint_is_saved_ends_the_run_with_that_checkpoint(parts):
    file = config(parts, "saving", max_steps=6, save_steps=2)
    with started([str(ROOT / "tests/integration/slow_save_worker.py"), str(file), "4"]) as run:
        checkpoint = parts / "saving/checkpoint-2"
        wait_until(run, lambda: (checkpoint / "trainer_state.json").is_file())
        os.kill(run.process.pid, signal.SIGTERM)
        assert wait_until(run, lambda: "stopping (SIGTERM): " in run.shown, 10) < 1.0
        assert run.wait(30) == 0, run.shown[-3000:]
        assert "stopped by a signal after step 2, which is saved" in run.shown
    assert (checkpoint / "stream_0.json").is_file()
    assert [line["step"] for line in metrics(parts / "saving") if "loss" in line] == [1, 2]
