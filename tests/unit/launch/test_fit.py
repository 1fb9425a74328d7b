"""Whether runs fit on GPUs, what is suggested if not, and `coordexp plan`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordexp.cli import app
from coordexp.cli.plan import load_for_gpus
from coordexp.config.rollout import EngineArgs
from coordexp.config.settings import Adapter, Model
from coordexp.errors import UserError
from coordexp.launch.fit import (
    GpuSplit,
    PlannedModel,
    Planner,
    SampleSize,
    change_setting,
    choose_rollouts,
    limit_pixels,
    row_size,
    split_gpus,
)
from coordexp.launch.memory import (
    CHUNK_LOGITS,
    GIB,
    EngineLoad,
    LearnerSetup,
    RowSize,
    engine_memory,
    learner_memory,
    loss_bytes,
)
from coordexp.objective.split import PROJECTED
from coordexp.shapes import PUBLISHED, count_parameters

COLOCATE, SERVERS, HF = (Path(f"configs/stage2-{name}.yaml") for name in ("colocate", "server-3v1", "hf"))
FULL = {"tokens": 16000, "image_tokens": 11000, "supervised": 4000}


def model(size):
    return PlannedModel.from_shape(size, PUBLISHED[size].with_coordinate_tokens())


def planner_for(config, size, gpus, memory, **options):
    settings, split = load_for_gpus(config, gpus)
    return Planner(model(size), SampleSize(), split, memory * GIB, **options), settings


def run(*words):
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def setup_for(settings, size, ranks=1):
    return LearnerSetup.from_settings(settings, model(size).weights, ranks)


def test_several_learners_add_buckets_and_fsdp_divides():
    settings, _ = load_for_gpus(COLOCATE, 8)
    planned = model("2b")
    parameters = count_parameters(planned.weights)
    several = learner_memory(planned.shape, planned.weights, setup_for(settings, "2b", 8), RowSize(**FULL))
    assert several.least_bytes == 20 * parameters
    sharded = change_setting(settings, "training.fsdp", True)
    memory = learner_memory(planned.shape, planned.weights, setup_for(sharded, "2b", 8), RowSize(**FULL))
    assert memory.least_bytes == 2 * parameters


def test_the_loss_holds_one_chunk_however_many_positions_there_are():
    settings, _ = load_for_gpus(COLOCATE, 1)
    shape, setup = model("4b").shape, setup_for(settings, "4b")
    per_position = shape.text.hidden * 2 + 1000 * 4
    assert CHUNK_LOGITS == PROJECTED
    assert loss_bytes(shape, 4000, setup) == 12 * CHUNK_LOGITS + 4000 * per_position
    assert loss_bytes(shape, 1, setup) == 12 * shape.text.vocabulary + per_position


def test_arguments_of_the_engine_change_its_memory():
    settings, _ = load_for_gpus(COLOCATE, 1)
    arguments = EngineArgs(max_num_batched_tokens=2048, kv_cache_dtype="fp8")
    changed = change_setting(settings, "rollout_matching.vllm.engine_args", arguments)
    planned = model("4b")
    before, after = (
        engine_memory(planned.shape, planned.weights, EngineLoad.from_settings(one, 1024))
        for one in (settings, changed)
    )
    assert after.longest_bytes == before.longest_bytes / 2
    assert after.requests_bytes == before.requests_bytes / 2
    pairs = zip(before.items, after.items, strict=True)
    (step,) = [item.bytes - other.bytes for item, other in pairs if item != other]
    assert step == pytest.approx(0.75 * 8192 * (3 * 9728 + 7 * 2560) * 2)


def test_a_limit_of_pixels_in_the_settings_limits_the_shape():
    class LimitedModel(Model):
        max_pixels: int | None = None

    settings, _ = load_for_gpus(COLOCATE, 1)
    shape = model("2b").shape
    limited = settings.model_copy(update={"model": LimitedModel(path="x", max_pixels=2**20)})
    assert limit_pixels(shape, limited).largest_image == 2**20
    assert limit_pixels(shape, settings) == shape


def test_rows_are_full_with_packing_and_hold_the_batch_without():
    settings, _ = load_for_gpus(COLOCATE, 1)
    shape = model("2b").shape
    assert row_size(settings, SampleSize(), shape) == RowSize(16000, 11 * 1024, 11 * 350)
    single = change_setting(settings, "training.packing", False)
    assert row_size(single, SampleSize(), shape) == RowSize(4 * (1024 + 40 + 350), 4 * 1024, 4 * 350)


def test_servers_get_the_first_gpus():
    settings, split = load_for_gpus(SERVERS, 4)
    assert split == GpuSplit((0, 1, 2), (3,))
    assert split_gpus(settings, 8, 6) == GpuSplit((0, 1, 2, 3, 4, 5), (6, 7))
    with pytest.raises(UserError, match="no GPU is left for a learner"):
        split_gpus(settings, 3)
    colocated, split = load_for_gpus(COLOCATE, 2)
    assert split == GpuSplit((), (0, 1))
    with pytest.raises(UserError, match="there are no servers"):
        split_gpus(colocated, 4, 2)


def test_a_run_that_fits_has_no_findings():
    planner, settings = planner_for(SERVERS, "2b", 4, 80)
    result = planner.plan(settings)
    assert result.verdict == "fits" and not result.findings
    assert [use.role for use in result.uses] == ["rollout server", "learner"]


@pytest.mark.parametrize(("config", "size", "gpus", "memory"), [(COLOCATE, "4b", 8, 80), (COLOCATE, "2b", 1, 80)])
def test_every_suggestion_makes_the_run_fit(config, size, gpus, memory):
    planner, settings = planner_for(config, size, gpus, memory)
    result = planner.plan(settings)
    assert result.verdict == "does not fit"
    suggestions = result.findings[0].fix.split("; or ")
    assert len(suggestions) >= 2
    for suggestion in suggestions:
        changed = settings
        for text in suggestion.removeprefix("set ").split(" and "):
            (change,) = [item for item in planner._changes(settings) if text.startswith(item.text)]
            changed = change_setting(changed, change.path, change.value)
        assert planner.estimate(changed).verdict == "fits", suggestion


LORA = ("model.adapter", Adapter(rank=32, alpha=64))
MANY = ("rollout_matching.decode_batch_size", 512)


@pytest.mark.parametrize(
    ("config", "size", "gpus", "memory", "change", "severity", "text"),
    [
        (COLOCATE, "2b", 1, 24, None, "error", "model.adapter: {type: lora"),
        (COLOCATE, "8b", 1, 8, None, "error", "use GPUs with more memory, or a smaller model"),
        (COLOCATE, "4b", 1, 24, LORA, "error", "a share of 0.45 of a GPU is 10.8 GiB"),
        (SERVERS, "2b", 4, 80, MANY, "warning", "of the configured requests"),
    ],
)
def test_what_does_not_fit_is_told_with_what_helps(config, size, gpus, memory, change, severity, text):
    planner, settings = planner_for(config, size, gpus, memory)
    finding, *_ = planner.plan(change_setting(settings, *change) if change else settings).findings
    assert finding.severity == severity and text in str(finding)


def test_an_engine_that_sleeps_leaves_its_memory_to_the_learner():
    planner, settings = planner_for(COLOCATE, "2b", 1, 80)
    assert planner.estimate(settings).verdict == "does not fit"
    sleeping = change_setting(settings, "rollout_matching.vllm.sleep", True)
    training, generating = planner.estimate(sleeping).uses
    assert training.verdict == generating.verdict == "fits"
    assert training.total < planner.estimate(settings).uses[0].total - 30 * GIB
    offloading = change_setting(sleeping, "rollout_matching.offload.enabled", True)
    kept = change_setting(offloading, "rollout_matching.offload.offload_optimizer", False)
    states = planner.estimate(kept).uses[1].total - planner.estimate(offloading).uses[1].total
    assert states == pytest.approx(8 * count_parameters(planner.model.weights))


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
    assert choose_rollouts(servers) == "server" and len(split.learners) == 2


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
