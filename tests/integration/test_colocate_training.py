"""Training on the answers of a colocated engine equals training on the learner's own answers, bit for bit."""

import json
import time

import pytest
import torch
import yaml

from tests.command import run
from tests.integration.leavings import leavings
from tests.integration.stage2_runs import (
    ROOT,
    check_losses,
    config,
    draw,
    finish,
    metrics,
    replayed_steps,
    started,
    steps,
    training,
    weights,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]

STEPS = 10
RUN = {"training__max_steps": STEPS, "training__save_steps": STEPS, "stage2__dump_every": 3}
# The mode is left at its default.
ENGINE = {
    "rollout_matching__rollout_backend": "vllm",
    "rollout_matching__vllm": {"gpu_memory_utilization": 0.1, "enforce_eager": True},
    "rollout_matching__offload": {"enabled": True, "offload_model": True, "offload_optimizer": True},
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("colocated"))


@pytest.fixture(scope="module")
def own(parts):
    """The folder of a run whose learner answers itself."""
    finish(training(config(parts, "own", **RUN)))
    return parts / "own"


@pytest.fixture(scope="module")
def colocated(parts):
    """The folder of a run in which an engine answers while the learner and its optimizer are out of memory."""
    shown = finish(training(config(parts, "colocated", **RUN, **ENGINE)))
    (parts / "colocated/shown").write_text(shown)
    return parts / "colocated"


@pytest.mark.scenario("R36.S1", on="engine")
def test_an_engine_gives_the_losses_and_the_counters_of_the_learners_own_answers(own, colocated):
    check_losses(colocated, own, STEPS)
    assert [line.keys() for line in steps(colocated)] == [line.keys() for line in steps(own)]
    assert sum(line["match/matched"] for line in steps(own)) > 0


@pytest.mark.scenario("R17.S1", on="engine")
def test_a_learner_that_leaves_memory_at_every_step_is_trained_to_the_same_bits(own, colocated):
    expected, actual = weights(own / f"checkpoint-{STEPS}"), weights(colocated / f"checkpoint-{STEPS}")
    assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []
    state = [torch.load(run / f"checkpoint-{STEPS}/optimizer.pt")["state"] for run in (own, colocated)]
    assert state[0].keys() == state[1].keys()
    assert all(torch.equal(value, state[1][k][name]) for k in state[0] for name, value in state[0][k].items())
    assert metrics(own)[-1]["step"] == STEPS


@pytest.mark.scenario("R07.S1", on="engine")
def test_without_a_mode_the_engine_runs_with_the_learner(colocated):
    rollouts = json.loads((colocated / "run.json").read_text())[0]["rollouts"]
    engine = {"backend": "vllm", "decode_mode": "greedy", "mode": "colocate", "tensor_parallel_size": 1}
    assert rollouts == engine | {"sync_mode": "full", "fallbacks": []}
    shown = (colocated / "shown").read_text()
    assert shown.count("starting vLLM (tensor_parallel_size 1)") == shown.count("vLLM is ready after") == 1


@pytest.mark.scenario("R07.S7", on="engine")
def test_answers_of_an_engine_are_parsed_strictly_and_give_the_same_result_when_corrected_again(colocated):
    done = run("replay", colocated / "dumps")
    assert replayed_steps(done.output) >= 4


def test_a_run_that_is_killed_leaves_nothing_and_resumes_to_the_same_bits(parts, colocated):
    changes = RUN | {"training__save_steps": 4}
    words = training(config(parts, "killed", **changes, **ENGINE))
    with leavings() as places, started(words, **places.variables) as run:
        while "step 7/" not in run.shown:
            assert run.process.poll() is None, run.shown[-3000:]
            time.sleep(0.02)
        run.process.kill()
        run.wait(20)
        assert run.remains() == {}
        assert places.left() == []
    finish([*words, "--resume"])
    expected, actual = weights(colocated / f"checkpoint-{STEPS}"), weights(parts / f"killed/checkpoint-{STEPS}")
    assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []
    assert [line["loss"] for line in steps(parts / "killed")] == [line["loss"] for line in steps(colocated)]


@pytest.mark.scenario("R07.C21", on="engine")
def test_stage_1_evaluates_an_adapter_with_an_engine_as_with_the_learner(parts):
    """Both evaluations send the adapter alone to the engine: that of two steps, and that of four. A wrong answer
    of the engine would end the run."""
    pipeline = yaml.safe_load((ROOT / "configs/stage1.yaml").read_text())["stage1"]["pipeline"]
    evaluated = {
        "custom__trainer_variant": "stage1_sft",
        "model__adapter": {"rank": 4, "alpha": 8, "train_coord_rows": False},
        "training__eval_strategy": "steps",
        "training__eval_steps": 2,
        "training__learning_rate": 1e-2,
        "rollout_matching__pipeline": None,
    }
    sync = {"mode": "adapter", "canary_every": 1, "fallback_to_full": False}
    engine = {"rollout_matching__vllm": ENGINE["rollout_matching__vllm"] | {"enable_lora": True, "sync": sync}}
    for name, more in (("hf", {}), ("vllm", engine)):
        stage1 = {"pipeline": pipeline, "eval_backend": name}
        shown = finish(training(config(parts, f"stage1-{name}", **evaluated, **more, stage1=stage1)))
        assert shown.count("vLLM is ready after") == (name == "vllm")
    for step in (2, 4):
        expected, actual = (
            [json.loads(line)["text"] for line in (parts / file).read_text().splitlines()]
            for file in (f"stage1-{name}/evaluations/step-{step}.answers.jsonl" for name in ("hf", "vllm"))
        )
        assert actual == expected and any("bbox_2d" in text for text in actual)
