"""Training on the answers of a colocated engine equals training on the learner's own answers, bit for bit."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoProcessor
from typer.testing import CliRunner

from coordexp.answers.table import VocabularyTable
from coordexp.cli import app
from coordexp.data import DataError
from coordexp.rollout.backend import Decode, ImageRef, Request
from coordexp.rollout.generate import generate_rollouts
from coordexp.rollout.prompt import PromptBuilder
from tests.integration.leavings import leavings
from tests.integration.stage2_runs import (
    MODEL,
    ROOT,
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

STEPS = 20
RUN = {"training__max_steps": STEPS, "training__save_steps": STEPS, "stage2__dump_every": 5}
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
    expected, actual = steps(own), steps(colocated)
    assert len(actual) == STEPS
    apart = max(abs(line["loss"] - other["loss"]) for line, other in zip(actual, expected, strict=True))
    print(f"largest difference of a loss: {apart:.1e}")
    assert apart <= 1e-5
    for line, other in zip(actual, expected, strict=True):
        assert line.keys() == other.keys()
        counters = [name for name in other if name.startswith(("rollout/", "parse/", "match/", "packing/"))]
        assert "rollout/answers" in counters
        assert {name: line[name] for name in counters} == {name: other[name] for name in counters}
    assert len({line["loss"] for line in expected}) == STEPS
    assert sum(line["match/matched"] for line in expected) > 0


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
    done = CliRunner().invoke(app, ["replay", str(colocated / "dumps")])
    assert done.exit_code == 0, done.output
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


def test_stage_1_evaluates_with_an_engine_as_with_the_learner(parts):
    """The weights of both evaluations are sent to the engine: those after two steps, and after four."""
    pipeline = yaml.safe_load((ROOT / "configs/stage1.yaml").read_text())["stage1"]["pipeline"]
    evaluated = {
        "custom__trainer_variant": "stage1_sft",
        "training__eval_strategy": "steps",
        "training__eval_steps": 2,
        "rollout_matching__pipeline": None,
    }
    engine = {key: value for key, value in ENGINE.items() if key.endswith("vllm")}
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


@pytest.mark.scenario("R07.S7", on="engine")
@pytest.mark.parametrize("change", ["other", "shorter", "longer"])
def test_an_engine_that_reads_another_prompt_than_training_uses_is_refused(parts, change):
    prompts = PromptBuilder(AutoProcessor.from_pretrained(MODEL), "Detect all objects.")
    image = ImageRef(str(parts / "data/images/train/0000000.png"), 64, 64)
    ids = prompts.ids(64, 64)
    read = {"other": [*ids[:5], ids[5] + 1, *ids[6:]], "shorter": ids[:-1], "longer": [*ids, 7]}[change]
    requests = [Request(image, Decode.greedy(2))]
    table = VocabularyTable.from_folder(MODEL)
    with pytest.raises(DataError, match=r"the engine's prompt .* is not the one that is trained on"):
        generate_rollouts(FakeEngine(read), prompts, table, requests)
    (rollout,) = generate_rollouts(FakeEngine(ids), prompts, table, requests)
    assert (rollout.prompt_ids, rollout.ids, rollout.version) == (tuple(ids), (3, 4), 7)


class FakeEngine:
    """Reports that it has read `prompt`, and answers two tokens."""

    llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=256))

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt

    def generate(self, prompts: list[Any], sampling: list[Any], use_tqdm: bool, lora_request: None) -> list[Any]:
        logprobs = [{id: SimpleNamespace(logprob=-1.0)} for id in (3, 4)]
        versions = [SimpleNamespace(version="7")]
        answer = SimpleNamespace(
            token_ids=[3, 4], logprobs=logprobs, weight_versions=versions, finish_reason="length"
        )
        return [SimpleNamespace(prompt_token_ids=self.prompt, outputs=[answer]) for _ in prompts]
