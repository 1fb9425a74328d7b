"""A fault of a colocated engine is reported in a few words and ends the run. Signals save, and what is killed
leaves nothing.

Runs of several ranks first train some steps that must equal those of `rollout_backend: hf`.
"""

import json
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from coordexp.answers.table import VocabularyTable
from coordexp.config import World, load_settings
from coordexp.errors import EngineError
from coordexp.rollout.start import EngineSetup, start_engine
from coordexp.train.stopping import START_GRACE
from tests.integration.leavings import find_segments, leavings
from tests.integration.servers import wait_for
from tests.integration.stage2_runs import MODEL, ROOT, config, draw, finish, started, steps, training

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

START = 400  # seconds for a run to start its engines on a busy machine

LONG = {"training__max_steps": 200, "training__save_steps": 200, "training__lr_scheduler_type": "constant"}
ENGINE = {"gpu_memory_utilization": 0.05, "enforce_eager": True}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("faults"))


def with_engine(folder, name, vllm=(), **changes):
    settings = {"rollout_matching__rollout_backend": "vllm", "rollout_matching__vllm": ENGINE | dict(vllm)}
    return config(folder, name, **(settings | LONG | changes))


def family(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process."""
    return psutil.Process(pid).children(recursive=True)


def all_ended(processes: list[psutil.Process], seconds: float = 10) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


@contextmanager
def running(words, until, ranks: int = 1, **variables: str):
    """Yield a run that has printed `until`, and its processes, which are killed at the end in any case."""
    with started(words, ranks, **variables) as run:
        while until not in run.shown:
            assert run.process.poll() is None, run.shown[-3000:]
            assert run.seconds < START, run.shown[-3000:]
            time.sleep(0.1)
        processes = family(run.process.pid)
        try:
            yield run, processes
        finally:
            for process in processes:
                if process.is_running():
                    process.kill()


# Engines that do not start


@pytest.mark.scenario("R07.S8", on="engine")
def test_an_engine_that_cannot_start_is_reported_in_the_words_of_vllm_with_a_fix(parts, monkeypatch):
    """It fails after its workers were started."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    file = with_engine(parts, "refused", {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.001})
    settings = load_settings(file, World(3)).settings.rollout_matching
    table = VocabularyTable.from_folder(MODEL)
    with pytest.raises(EngineError) as error:
        start_engine(EngineSetup(MODEL, "float32", settings, table, torch.device("cpu")))
    assert str(error.value).startswith("vLLM did not start: Available memory on node 0 ")
    assert str(error.value).endswith(
        "or set rollout_matching.rollout_backend: hf (in Stage 1: stage1.eval_backend: hf), which needs no engine"
    )


# Runs


# Steps 3 and 5 take rollouts, and then step 8.
MIXED = {"custom__trainer_variant": "stage2_two_channel", "stage2__b_ratio": 0.4}


@pytest.fixture(scope="module")
def losses(parts):
    """The losses of five steps of two ranks whose learner answers itself."""
    changes = LONG | MIXED | {"training__max_steps": 5, "training__save_strategy": "no"}
    finish(training(config(parts, "hf", **changes)), processes=2)
    return [line["loss"] for line in steps(parts / "hf")]


@pytest.mark.cold
def test_ctrl_c_ends_a_run_whose_engine_is_starting(parts):
    """A terminal sends it to all processes."""
    with running(training(with_engine(parts, "interrupted")), until="starting vLLM") as (run, _):
        time.sleep(2)  # vLLM is being imported by now
        everything, at = family(run.process.pid), time.monotonic()
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait(90) == 130, run.shown[-3000:]
        assert time.monotonic() - at < START_GRACE + 15
        assert all_ended(everything)
        shown = run.shown
    assert shown.count("stopping (SIGINT)") == 1
    assert "Traceback" not in shown
    assert not list((parts / "interrupted").glob("checkpoint-*"))


def test_a_signal_during_training_saves_the_step_and_leaves_nothing(parts):
    """The test of two ranks sends SIGTERM."""
    words = training(with_engine(parts, "signalled"))
    with leavings() as places, running(words, until="step 2/", **places.variables) as (run, _):
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait(90) == 130, run.shown[-3000:]
        assert run.remains() == {}
        assert places.left() == []
        shown = run.shown
    assert "stopped by a signal after step" in shown and "Traceback" not in shown
    assert list((parts / "signalled").glob("checkpoint-*"))


def test_two_ranks_with_an_engine_each_train_as_without_engines_and_save_when_they_are_asked_to_stop(
    parts, losses
):
    words = training(with_engine(parts, "two", {"tensor_parallel_size": 1}, **MIXED))
    with running(words, until="step 5/", ranks=2) as (run, _):
        os.kill(run.rank(1), signal.SIGTERM)
        assert run.wait(90) == 0, run.shown[-3000:]
        assert run.remains() == {}
        assert "stopped by a signal after step" in run.shown
    assert [line["loss"] for line in steps(parts / "two")][:5] == pytest.approx(losses, rel=1e-5)
    assert list((parts / "two").glob("checkpoint-*"))


def test_sharded_ranks_that_share_an_engine_train_as_without_it_and_leave_nothing_when_one_is_killed(
    parts, losses
):
    """The ranks are sharded with FSDP2, and the engine is one over both (tensor parallelism)."""
    file = with_engine(parts, "shared", {"tensor_parallel_size": 2}, **MIXED)
    plan = parts / "plan.json"
    plan.write_text(json.dumps([{"name": "shared", "config": str(file), "resume": False, "sharded": True}]))
    words = [str(ROOT / "tests/integration/stage2_worker.py"), str(plan)]
    before = {*Path("/dev/shm").iterdir()}
    with leavings() as places, running(words, until="step 5/", ranks=2, **places.variables) as (run, _):
        places.look(run.process.pid)
        os.kill(run.rank(0), signal.SIGKILL)
        assert run.wait(90) == 1, run.shown[-3000:]
        assert run.remains() == {}
        wait_for(lambda: not places.left(), 15, lambda: str(places.left()))
        in_use = {Path(segment) for pid in psutil.pids() for segment in find_segments(pid)}  # by other tests
        left = {*Path("/dev/shm").iterdir()} - before - in_use
        assert [file.name for file in left if "cpushm" in file.name and file.name[0].isdigit()] == []
    assert [line["loss"] for line in steps(parts / "shared")][:5] == pytest.approx(losses, rel=1e-5)
