"""Whether runs fit on GPUs, and `coordexp plan`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordexp.cli import app
from coordexp.cli.plan import change_setting, load_for_gpus
from coordexp.config.rollout import EngineArgs
from coordexp.config.settings import Adapter
from coordexp.errors import UserError
from coordexp.launch.memory import (
    CACHE,
    CHUNK_LOGITS,
    GIB,
    LOGITS,
    Learner,
    Model,
    RowSize,
    SampleSize,
    choose_rollouts,
    engine_parts,
    largest_image,
    plan_memory,
    total_bytes,
)
from coordexp.objective.split import PROJECTED
from coordexp.shapes import PUBLISHED, count_parameters

COLOCATE, SERVERS = Path("configs/stage2-colocate.yaml"), Path("configs/stage2-server-3v1.yaml")
FULL = RowSize(tokens=16000, image_tokens=11000, supervised=4000)


def plan(config, size, gpus, memory, *changes):
    """Return the use of the GPUs and the findings, with some settings changed."""
    settings, split = load_for_gpus(config, gpus)
    for path, value in changes:
        settings = change_setting(settings, path, value)
    return plan_memory(settings, Model.published(size), SampleSize(), split, memory * GIB)


def run(*words):
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def test_several_learners_add_buckets_and_fsdp_divides():
    settings, _ = load_for_gpus(COLOCATE, 8)
    planned = Model.published("2b")
    parameters = count_parameters(planned.weights)
    assert total_bytes(Learner(settings, planned, FULL, 8).least()) == 20 * parameters
    sharded = change_setting(settings, "training.fsdp", True)
    assert total_bytes(Learner(sharded, planned, FULL, 8).least()) == 2 * parameters


def test_the_loss_holds_one_chunk_however_many_positions_there_are():
    settings, _ = load_for_gpus(COLOCATE, 1)
    adapted, planned = change_setting(settings, "model.adapter", Adapter()), Model.published("4b")
    text = planned.shape.text
    per_position = text.hidden * 2 + 1000 * 4

    def loss(supervised):
        learner = Learner(adapted, planned, RowSize(16000, 11000, supervised))
        return next(parts[LOGITS] for parts in learner.moments() if LOGITS in parts)

    assert CHUNK_LOGITS == PROJECTED
    assert loss(4000) == 12 * CHUNK_LOGITS + 4000 * per_position
    assert loss(1) == 12 * text.vocabulary + per_position


def test_arguments_of_the_engine_and_a_limit_of_pixels_change_its_memory():
    settings, _ = load_for_gpus(COLOCATE, 1)
    arguments = EngineArgs(max_num_batched_tokens=2048, kv_cache_dtype="fp8")
    changed = change_setting(settings, "rollout_matching.vllm.engine_args", arguments)
    planned = Model.published("4b")
    before, after = (engine_parts(changeable, planned) for changeable in (settings, changed))
    step = "language model, one engine step"
    assert after[CACHE] == before[CACHE] / 2
    assert before[step] - after[step] == pytest.approx(0.75 * 8192 * (3 * 9728 + 7 * 2560) * 2)
    assert {name for name in before if before[name] != after[name]} == {CACHE, step}
    limited = change_setting(settings, "model.max_pixels", 2**20)
    assert largest_image(limited, planned.shape) == 2**20
    encoder = "encoder, for the largest image"
    assert engine_parts(limited, planned)[encoder] == before[encoder] / 16


def test_rows_are_full_with_packing_and_hold_the_batch_without():
    settings, _ = load_for_gpus(COLOCATE, 1)
    shape = PUBLISHED["2b"]
    assert RowSize.from_settings(settings, SampleSize(), shape) == RowSize(16000, 11 * 1024, 11 * 350)
    single = change_setting(settings, "training.packing", False)
    row = RowSize(4 * (1024 + 40 + 350), 4 * 1024, 4 * 350)
    assert RowSize.from_settings(single, SampleSize(), shape) == row


def test_servers_get_the_first_gpus():
    assert load_for_gpus(SERVERS, 4)[1] == ((0, 1, 2), (3,))
    assert load_for_gpus(SERVERS, 8, 6)[1] == ((0, 1, 2, 3, 4, 5), (6, 7))
    assert load_for_gpus(COLOCATE, 2)[1] == ((), (0, 1))
    with pytest.raises(UserError, match="no GPU is left for a learner"):
        load_for_gpus(SERVERS, 3)
    with pytest.raises(UserError, match="there are no servers"):
        load_for_gpus(COLOCATE, 4, 2)


def test_a_run_that_fits_has_no_findings():
    uses, findings = plan(SERVERS, "2b", 4, 80)
    assert {use.verdict for use in uses} == {"fits"} and not findings
    assert [use.role for use in uses] == ["rollout server", "learner"]


UTILIZATION = "rollout_matching.vllm.gpu_memory_utilization"
LORA = ("model.adapter", Adapter(rank=32, alpha=64))
MANY = ("rollout_matching.decode_batch_size", 512)


@pytest.mark.parametrize(
    ("config", "size", "gpus", "memory", "changes", "severity", "subject"),
    [
        (COLOCATE, "8b", 1, 80, [], "error", "memory"),
        (COLOCATE, "4b", 1, 24, [LORA], "error", UTILIZATION),
        (SERVERS, "2b", 4, 80, [MANY], "warning", UTILIZATION),
    ],
)
def test_what_does_not_fit_is_told_with_what_helps(config, size, gpus, memory, changes, severity, subject):
    finding, *_ = plan(config, size, gpus, memory, *changes)[1]
    assert (finding.severity, finding.subject) == (severity, subject) and finding.fix


def test_an_engine_that_sleeps_leaves_its_memory_to_the_learner():
    (together,), findings = plan(COLOCATE, "2b", 1, 80)
    assert together.verdict == "does not fit" and findings
    sleep = ("rollout_matching.vllm.sleep", True)
    (training, generating), findings = plan(COLOCATE, "2b", 1, 80, sleep)
    assert training.verdict == generating.verdict == "fits" and not findings
    assert training.total < together.total - 30 * GIB
    offload = ("rollout_matching.offload.enabled", True)
    offloading = plan(COLOCATE, "2b", 1, 80, sleep, offload)[0][1]
    keep = ("rollout_matching.offload.offload_optimizer", False)
    states = plan(COLOCATE, "2b", 1, 80, sleep, offload, keep)[0][1].total - offloading.total
    assert states == pytest.approx(8 * count_parameters(Model.published("2b").weights))


def test_the_plan_as_json_has_the_parts_in_bytes():
    result = run("--config", SERVERS, "--size", "2b", "--gpus", 4, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    server, learner = report["details"]["gpus"]
    assert report["ok"] and report["details"]["verdict"] == "fits" and report["details"]["rollouts"] == "server"
    assert server["gpus"] == [0, 1, 2] and learner["gpus"] == [3]
    names = {name for use in (server, learner) for items in use["parts"].values() for name in items}
    assert {"optimizer states", "KV cache", "CUDA context"} <= names
    for use in (server, learner):
        parts = sum(sum(items.values()) for items in use["parts"].values()) + use["reserve"]
        assert parts == pytest.approx(use["total"], abs=100)


def test_other_rollouts_and_an_adapter_can_be_planned_for_the_same_config():
    result = run("--config", COLOCATE, "--size", "4b", "--memory", 24, "--rollouts", "hf", "--lora", 32, "--json")
    assert result.exit_code == 0, result.output
    details = json.loads(result.stdout)["details"]
    assert details["rollouts"] == "hf" and [use["role"] for use in details["gpus"]] == ["learner"]
    servers, split = load_for_gpus(COLOCATE, 4, 2, "server")
    assert choose_rollouts(servers) == "server" and split == ((0, 1), (2, 3))


def test_a_missing_checkpoint_is_reported_with_the_way_out():
    result = run("--config", COLOCATE)
    assert result.exit_code == 1 and "--size 4b" in result.output
    result = run("--config", COLOCATE, "--size", "4b", "--model", "x")
    assert "leave one of the two out" in result.output


def test_launch_plan_and_run_verify_import_no_torch():
    words = ["plan", "--config", str(SERVERS), "--size", "2b", "--gpus", "4", "--json"]
    code = (
        "import sys, coordexp.cli.launch, coordexp.launch.processes, coordexp.train.checkpoints; "
        "from coordexp.cli import app; "
        f"app({words!r}, standalone_mode=False); assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
