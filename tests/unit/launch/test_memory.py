"""Whether runs fit on GPUs, and `coordexp plan`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coordexp.cli.plan import load_for_gpus
from coordexp.errors import UserError
from coordexp.launch.memory import (
    CACHE,
    CHUNK_LOGITS,
    GIB,
    Learner,
    Model,
    RowSize,
    SampleSize,
    engine_parts,
    plan_memory,
    total_bytes,
)
from coordexp.objective.split import PROJECTED
from coordexp.shapes import PUBLISHED, count_parameters
from tests.command import run

COLOCATE, SERVERS = Path("configs/stage2-colocate.yaml"), Path("configs/stage2-server-3v1.yaml")

UTILIZATION = "rollout_matching.vllm.gpu_memory_utilization"
FULL = RowSize(tokens=16000, image_tokens=11000, supervised=4000)


def plan(config, size, gpus, memory, *overrides):
    """Return the use of the GPUs and the findings, with some settings changed."""
    settings = load_for_gpus(config, gpus, overrides)
    return plan_memory(settings, Model.published(size), SampleSize(), gpus, memory * GIB)


def test_several_learners_add_buckets_and_fsdp_divides():
    planned = Model.published("2b")
    parameters = count_parameters(planned.weights)
    learner, sharded = (
        Learner(load_for_gpus(COLOCATE, 8, overrides), planned, FULL, 8)
        for overrides in ((), ("training.fsdp=true", "stage2.max_staleness=0"))
    )
    assert total_bytes(learner.least()) == 20 * parameters
    assert total_bytes(sharded.least()) == 2 * parameters


def test_the_loss_holds_one_chunk_however_many_positions_there_are():
    adapted, planned = load_for_gpus(COLOCATE, 1, ("model.adapter.rank=32",)), Model.published("4b")
    text = planned.shape.text
    per_position = text.hidden * 2 + 1000 * 4
    many, one = (Learner(adapted, planned, RowSize(16000, 11000, count)).loss_bytes() for count in (4000, 1))
    assert CHUNK_LOGITS == PROJECTED
    assert many == 12 * CHUNK_LOGITS + 4000 * per_position
    assert one == 12 * text.vocabulary + per_position


def test_arguments_of_the_engine_and_a_limit_of_pixels_change_its_memory():
    engine, planned = "rollout_matching.vllm.engine_args", Model.published("4b")
    arguments = f"{engine}.max_num_batched_tokens=2048", f"{engine}.kv_cache_dtype=fp8"
    before, after, limited = (
        engine_parts(load_for_gpus(COLOCATE, 1, overrides), planned)
        for overrides in ((), arguments, ("model.max_pixels=1048576",))
    )
    step, encoder = "language model, one engine step", "encoder, for the largest image"
    assert after[CACHE] == before[CACHE] / 2
    assert before[step] - after[step] == pytest.approx(0.75 * 8192 * (3 * 9728 + 7 * 2560) * 2)
    assert {name for name in before if before[name] != after[name]} == {CACHE, step}
    assert limited[encoder] == before[encoder] / 16


def test_rows_are_full_with_packing_and_hold_the_batch_without():
    packed, single = (
        load_for_gpus(COLOCATE, 1, (f"training.packing={packing}",)) for packing in ("true", "false")
    )
    shape = PUBLISHED["2b"]
    assert RowSize.from_settings(packed, SampleSize(), shape) == RowSize(16000, 11 * 1024, 11 * 350)
    row = RowSize(4 * (1024 + 40 + 350), 4 * 1024, 4 * 350)
    assert RowSize.from_settings(single, SampleSize(), shape) == row


def test_servers_get_the_first_gpus_and_learners_the_others():
    uses, findings = plan(SERVERS, "2b", 4, 80)
    assert [(use.role, use.gpus) for use in uses] == [("rollout server", (0, 1, 2)), ("learner", (3,))]
    assert all(use.fits for use in uses) and not findings
    assert plan(COLOCATE, "2b", 2, 80)[0][0].gpus == (0, 1)
    with pytest.raises(UserError, match="no GPU is left for a learner"):
        load_for_gpus(SERVERS, 3)


@pytest.mark.parametrize(
    ("size", "memory", "overrides", "subject"),
    [("8b", 80, (), "memory"), ("4b", 24, ("model.adapter.rank=32",), UTILIZATION)],
)
def test_what_does_not_fit_is_told_with_what_helps(size, memory, overrides, subject):
    finding, *_ = plan(COLOCATE, size, 1, memory, *overrides)[1]
    assert (finding.severity, finding.subject) == ("error", subject) and finding.fix


def test_an_engine_that_sleeps_leaves_its_memory_to_the_learner():
    (together,), findings = plan(COLOCATE, "2b", 1, 80)
    assert not together.fits and findings
    sleep, offload = "rollout_matching.vllm.sleep=true", "rollout_matching.offload.enabled=false"
    (training, answering), findings = plan(COLOCATE, "2b", 1, 80, sleep, offload)
    assert training.fits and answering.fits and not findings
    assert training.total < together.total - 30 * GIB
    _, offloading = plan(COLOCATE, "2b", 1, 80, sleep)[0]
    states = answering.total - offloading.total
    assert states == pytest.approx(8 * count_parameters(Model.published("2b").weights))


def test_rollouts_with_transformers_need_a_cache_that_may_be_larger_than_a_step():
    few, many = (
        plan(
            COLOCATE, "2b", 1, 80, "rollout_matching.rollout_backend=hf", f"rollout_matching.decode_batch_size={n}"
        )
        for n in (4, 512)
    )
    assert CACHE not in few[0][0].processes["learner"] and CACHE in many[0][0].processes["learner"]


def test_the_plan_as_json_has_the_parts_in_bytes():
    result = run("plan", "--config", SERVERS, "--size", "2b", "--gpus", 4, "--json")
    report = json.loads(result.stdout)
    server, learner = report["details"]["gpus"]
    assert report["ok"] and report["details"]["rollouts"] == "server"
    assert server["gpus"] == [0, 1, 2] and learner["gpus"] == [3]
    names = {name for use in (server, learner) for items in use["parts"].values() for name in items}
    assert {"optimizer states", "KV cache", "CUDA context"} <= names
    for use in (server, learner):
        parts = sum(sum(items.values()) for items in use["parts"].values())
        assert use["fits"] and parts == pytest.approx(use["total"], abs=100)


def test_a_missing_checkpoint_is_reported_with_the_way_out():
    result = run("plan", "--config", COLOCATE, code=1)
    assert "--size 4b" in result.output


def test_launch_plan_and_run_verify_import_no_torch():
    words = ["plan", "--config", str(SERVERS), "--size", "2b", "--gpus", "4", "--json"]
    code = (
        "import sys, coordexp.cli.launch, coordexp.launch.processes, coordexp.train.checkpoints; "
        "from coordexp.cli import app; "
        f"app({words!r}, standalone_mode=False); assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
