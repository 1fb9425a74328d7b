"""Runs that diverge stop with the step and the reason, and leave only finite checkpoints. On a tiny model."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coordexp.train.stopping import MAX_BROKEN_STEPS
from tests.integration.stage1_runs import config, make_parts, ran, train
from tests.integration.stage2_runs import ROOT, metrics, started

pytestmark = pytest.mark.timeout(480)
CONSTANT = {"lr_scheduler_type": "constant"}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return make_parts(tmp_path_factory.mktemp("diverges"))


def failing(file: Path) -> str:
    """Run it, assert that it exits 1 without a traceback, and return what it printed."""
    done = ran(file)
    shown = done.stdout + done.stderr
    assert done.returncode == 1 and "Traceback" not in shown, shown[-3000:]
    return shown


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


def is_finite(folder: Path) -> bool:
    """Return True if all weights and the optimizer's state are finite."""
    states = torch.load(folder / "optimizer.pt", weights_only=True)["state"].values()
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    tensors += load_file(folder / "model.safetensors").values()
    return all(tensor.isfinite().all() for tensor in tensors)


def test_a_run_that_diverges_stops_and_its_good_checkpoint_can_be_resumed(parts):
    """One checkpoint is kept. That of step 2, whose weights are finite but far too large, must not replace it.
    Warm-up begins with a learning rate of 0, so the first step is good."""
    warm = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4, "learning_rate": 1e20}
    settings = warm | {"max_grad_norm": 0.0, "save_steps": 1, "save_total_limit": 1}
    file = config(parts, "explodes", max_steps=8, **settings)
    shown = failing(file)
    assert re.search(r"step 3: the gradient norm is (NaN|Inf)", shown), shown
    assert "lower training.learning_rate" in shown and "done" not in shown
    assert "checkpoint-2 holds the weights that this began with" in shown
    assert checkpoints(parts / "explodes") == [1, 2]
    assert all(is_finite(parts / "explodes" / f"checkpoint-{step}") for step in (1, 2))
    assert [line["step"] for line in metrics(parts / "explodes")] == [1, 2]
    shutil.rmtree(parts / "explodes" / "checkpoint-2")
    config(parts, "explodes", max_steps=2, **settings)
    assert "resuming from" in train(file, "--resume")
    assert checkpoints(parts / "explodes") == [2]


def test_broken_logits_of_one_rank_are_told_and_not_saved_and_stop_all_ranks(parts):
    """The step after the newest checkpoint is broken, so the one before it is kept beyond save_total_limit."""
    settings = {"save_steps": 1, "save_total_limit": 1} | CONSTANT
    file = config(parts, "broken", max_steps=20, **settings)
    with started([str(ROOT / "tests/integration/divergence_worker.py"), str(file), "3"], processes=2) as run:
        assert run.wait(400) == 1, run.shown[-3000:]
        shown = run.shown
    last = 2 + MAX_BROKEN_STEPS
    warned = re.findall(r"warning: step (\d+): ([\d,]+) logits were NaN, infinite or beyond", shown)
    assert [int(step) for step, _ in warned] == list(range(3, last)) and all(count != "0" for _, count in warned)
    unsaved = [int(step) for step in re.findall(r"step (\d+): no checkpoint is saved", shown)]
    assert unsaved == list(range(3, last))
    assert f"step {last}: logits were broken in {MAX_BROKEN_STEPS} steps in a row" in shown
    assert "lost another rank" not in shown and "]: Traceback" not in shown  # of a rank; torchrun has its own
    folder = parts / "broken"
    assert checkpoints(folder) == [1, 2]
    assert is_finite(folder / "checkpoint-2")


def test_weights_that_are_not_finite_are_not_saved(parts):
    """The first update overflows because of weight decay. Loss and gradient, which came before it, are finite."""
    settings = {"learning_rate": 1e30, "weight_decay": 1e20, "max_steps": 4, "save_steps": 1}
    shown = failing(config(parts, "overflows", **settings, **CONSTANT))
    assert re.search(
        r"step 1: the weight [\w.]+ has NaN or infinite values after the update; it is not saved", shown
    )
    assert "lower training.learning_rate" in shown
    assert checkpoints(parts / "overflows") == []
