"""Stage 2 with real processes: the committed model answers drawn scenes and is trained on its corrected
answers.

Runs take long to start, so tests share them: one process makes all watched runs of one rank, and one pair of
processes those of two ranks.
"""

import json
import math
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command import run
from tests.integration.answers import answers, backend, whole_model
from tests.integration.servers import wait_for
from tests.integration.stage2_runs import (
    DRAWN,
    MODEL,
    ROOT,
    config,
    draw,
    finish,
    specified_settings,
    started,
    steps,
    training,
    weights,
)

pytestmark = pytest.mark.timeout(480)

SHORT = {"training__max_steps": 3, "training__save_steps": 3}
EVALUATED = {**SHORT, "training__eval_strategy": "steps", "training__eval_steps": 3}
BOTH_CHANNELS = {"custom__trainer_variant": "stage2_two_channel"}
MIXED = {
    **BOTH_CHANNELS,
    **DRAWN,
    "stage2__b_ratio": 0.5,
    "training__max_steps": 6,
    "training__save_steps": 3,
    "training__lr_scheduler_type": "constant",
}
# One step on the same six samples, however they are dealt; the gradient is clipped.
SIX_SAMPLES = {
    "training__packing": False,
    "training__max_steps": 1,
    "training__save_strategy": "no",
    "training__max_grad_norm": 0.2,
}
ONE_BY_ONE = {"training__per_device_train_batch_size": 1, "training__gradient_accumulation_steps": 6}
IN_ONE_ROW = {
    "training__per_device_train_batch_size": 6,
    "training__gradient_accumulation_steps": 1,
    "training__packing": True,
    "global_max_length": 1024,
    "training__packing_min_fill_ratio": 0.85,
}
# The samples have 118, 115, 81, 118, 115 and 81 tokens. Of two ranks, which take turns, one needs two rows for its
# three samples, and the other three.
HALF = {"global_max_length": 198, "training__gradient_accumulation_steps": 1}
# In file order, two ranks of batch 3: rank 1 has records 1, 3 and 5 in the first step and record 9 in the second.
IN_ORDER = {"training__train_sampling_strategy": "sequential", "training__gradient_accumulation_steps": 1}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("stage2"))


class Watched:
    """What each rank of a watched run has recorded."""

    def __init__(self, folder: Path, jobs: list[dict], processes: int = 1) -> None:
        self.folder = folder
        plan = folder / f"plan-{processes}.json"
        plan.write_text(json.dumps(jobs))
        self.shown = finish([str(ROOT / "tests/integration/stage2_worker.py"), str(plan)], processes)

    def __call__(self, name: str, rank: int = 0) -> dict:
        return json.loads((self.folder / f"{name}-{rank}.json").read_text())

    def gradients(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}.safetensors")


def job(folder: Path, name: str, *given: dict, resume: bool = False, sharded: bool = False, **changes) -> dict:
    merged = {key: value for settings in (*given, changes) for key, value in settings.items()}
    return {"name": name, "config": str(config(folder, name, **merged)), "resume": resume, "sharded": sharded}


@pytest.fixture(scope="module")
def by_one(parts):
    pipeline = specified_settings()["pipeline"]
    stage1 = {"custom__trainer_variant": "stage1_sft", "stage1__pipeline": pipeline}
    resumed = str(parts / "mixed-resumed")
    jobs = [
        job(parts, "aligned", EVALUATED, training__per_device_eval_batch_size=1, stage2__dump_every=None),
        job(parts, "all-b", EVALUATED, BOTH_CHANNELS, stage2__b_ratio=1.0, training__per_device_eval_batch_size=7),
        job(parts, "all-a", SHORT, BOTH_CHANNELS, stage2__b_ratio=0.0),
        job(parts, "stage1", SHORT, stage1),
        job(parts, "mixed", MIXED),
        job(parts, "mixed-cut", MIXED, training__max_steps=3, training__output_dir=resumed),
        job(parts, "mixed-resumed", MIXED, resume=True),
        job(parts, "micro-steps", SIX_SAMPLES),
        job(parts, "one-by-one", SIX_SAMPLES, ONE_BY_ONE),
        job(parts, "in-one-row", SIX_SAMPLES, IN_ONE_ROW),
    ]
    return Watched(parts, jobs)


def calls(parts: Path) -> list[dict]:
    """Return the requests of two ranks, call by call."""
    images = [str(parts / f"data/images/train/{k:07d}.png") for k in range(8)]
    sampling, beam = {"mode": "sampling", "temperature": 1.0}, {"mode": "beam", "num_beams": 2}
    return [
        {"decode": {}, "pictures": [images[:3], []]},
        {"decode": {}, "pictures": [[], images[3:4]]},
        {"decode": sampling, "pictures": [images[4:5], images[5:8]]},
        {"decode": beam, "pictures": [images[:2], images[2:3]]},
    ]


def asks(parts: Path, mode: str) -> dict:
    (parts / "damaged.png").write_bytes(b"not a picture")
    damaged = [[str(parts / "data/images/train/0000000.png")], [str(parts / "damaged.png")]]
    held = {"folder": str(MODEL), "mode": mode, "calls": calls(parts), "damaged": damaged}
    return {"name": f"held-{mode}", "held": held}


@pytest.fixture(scope="module")
def by_two(parts):
    """Make the watched runs of two ranks. The last ones fail, on both ranks."""
    image_data, record = (shutil.copytree(parts / "data", parts / name) for name in ("no-picture", "no-record"))
    (image_data / "images/val/0000001.png").write_bytes(b"not a picture")
    lines = (record / "train.jsonl").read_text().splitlines()
    lines[9] = json.dumps(json.loads(lines[9]) | {"objects": [{"desc": "", "bbox_2d": [0, 0, 9, 9]}]})
    (record / "train.jsonl").write_text("".join(f"{line}\n" for line in lines))
    jobs = [
        asks(parts, "ddp"),
        asks(parts, "fsdp2"),
        job(parts, "ddp", SIX_SAMPLES, HALF),
        job(parts, "fsdp2", SIX_SAMPLES, HALF, sharded=True),
        job(parts, "mixed-by-two", MIXED),
        job(parts, "damaged-picture", EVALUATED, IN_ORDER, custom__val_jsonl=str(image_data / "val.jsonl")),
        job(
            parts, "damaged-record", SHORT, IN_ORDER, sharded=True, custom__train_jsonl=str(record / "train.jsonl")
        ),
    ]
    return Watched(parts, jobs, processes=2)


@pytest.fixture(scope="module")
def trained(parts):
    """Return the folder of a run that was started from the command line."""
    finish(training(config(parts, "trained", **EVALUATED, stage2__dump_every=2)))
    return parts / "trained"


@pytest.mark.scenario("R08.C1", "R18.S1", on="processes")
def test_the_variant_alone_makes_the_command_train_on_rollouts(trained):
    lines = steps(trained)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["rollout/answers"] == 6 for line in lines)
    assert sum(line["match/matched"] for line in lines) > sum(line["match/missed"] for line in lines) > 0
    assert 0 < sum(line["rollout/cut_off"] for line in lines) < 18
    before, after = load_file(MODEL / "model.safetensors"), weights(trained / "checkpoint-3")
    assert any(not torch.equal(before[name].float(), after[name]) for name in before)
    assert json.loads((trained / "run.json").read_text())[0]["rollouts"]["backend"] == "hf"


def test_dumped_examples_come_out_the_same_when_they_are_corrected_again(trained):
    assert sorted(path.name for path in (trained / "dumps").glob("step-*")) == [
        "step-000000.jsonl",
        "step-000002.jsonl",
    ]
    done = run("replay", trained / "dumps")
    assert "8 examples of 2 steps come out the same" in done.output


def test_a_run_with_dumps_is_the_one_without_bit_for_bit(parts, by_one, trained):
    assert not (parts / "aligned/dumps").exists()
    same_run(parts / "aligned", trained, last=3)


@pytest.mark.scenario("R06.C6", "R06.S1", on="processes")
def test_a_packed_step_has_the_gradient_of_its_samples_one_by_one(parts, by_one):
    lines = steps(parts / "aligned")
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["packing/segments"] > 1 and 0.5 < line["packing/fill"] <= 1 for line in lines)
    assert [len(row) for row in by_one("in-one-row")["trained"]] == [6]
    assert [len(row) for row in by_one("one-by-one")["trained"]] == [1] * 6
    same_step(parts, by_one, "one-by-one", by_one, "in-one-row")


@pytest.mark.scenario("R05.C2", on="processes")
def test_without_packing_a_micro_batch_is_cut_into_rows_under_the_cap_and_keeps_its_gradient(parts, by_one):
    assert by_one("one-by-one")["forwards"] == [118, 115, 81, 118, 115, 81]
    assert by_one("micro-steps")["forwards"] == [118 + 115, 81] * 2  # a row has at most 256 tokens
    same_step(parts, by_one, "one-by-one", by_one, "micro-steps")


@pytest.mark.scenario("R05.C2", on="processes")
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks_cut_their_micro_batches_into_the_same_number_of_rows(parts, by_two, mode):
    first, second = (by_two(mode, rank) for rank in range(2))
    assert first["error"] is second["error"] is None
    assert first["forwards"] == [118, 81, 115]  # 81 and 115 would fit into one row of 198
    assert second["forwards"] == [115, 118, 81]


@pytest.mark.scenario("R05.C10", on="processes")
def test_a_run_warns_of_rows_that_are_filled_less_than_the_ratio_and_of_no_others(parts, by_one):
    (line,) = steps(parts / "in-one-row")
    assert 0.5 < line["packing/fill"] < 0.85
    warnings = [shown for shown in by_one.shown.splitlines() if "packed rows are filled" in shown]
    assert warnings == [
        f"warning: step 1: packed rows are filled to {line['packing/fill']:.3f} on average, and "
        "training.packing_min_fill_ratio is 0.85; few segments wait for a row: start a new run with a larger "
        "training.per_device_train_batch_size or a smaller global_max_length"
    ]


@pytest.mark.scenario("R19.S1", on="processes")
def test_a_row_is_one_forward_pass_and_a_sample_is_in_one_row(by_one):
    seen = by_one("aligned")
    assert len(seen["forwards"]) == len(seen["trained"]) == 3 * 2  # micro-steps
    assert {channel for row in seen["trained"] for _, channel in row} == {"B"}
    trained = Counter(image for row in seen["trained"] for image, _ in row)
    assert trained + Counter(seen["waiting"]) == Counter(seen["taken"])
    assert max(trained.values()) == 1


@pytest.mark.scenario("R10.C9", "R10.S3", on="processes")
def test_evaluation_decodes_by_decode_batch_size_whatever_the_evaluation_batch_is(parts, by_one):
    for name in ("aligned", "all-b"):  # with evaluation batches of 1 and of 7
        at_the_end = [count for step, count in by_one(name)["decoded"] if step == 3]
        assert at_the_end == [4, 2]
    for file in ("step-3.json", "step-3.answers.jsonl"):
        aligned, seven = ((parts / name / "evaluations" / file).read_bytes() for name in ("aligned", "all-b"))
        assert aligned == seven


@pytest.mark.scenario("R10.S3", on="processes")
def test_an_evaluation_writes_what_predict_writes_from_its_checkpoint(parts, trained, tmp_path):
    words = ["--model", trained / "checkpoint-3", "--data", parts / "data/val.jsonl", "--out", tmp_path / "p.json"]
    limits = ["--batch", 4, "--max-new-tokens", 48]
    run("predict", *words + limits)
    for suffix in ("json", "answers.jsonl"):
        evaluated = (trained / f"evaluations/step-3.{suffix}").read_text()
        assert evaluated == (tmp_path / f"p.{suffix}").read_text()
    assert evaluated.count("\n") == 6


def same_step(parts: Path, first: Watched, reference: str, second: Watched, other: str) -> None:
    """Assert that `other` made the step of `reference`: its gradient after clipping, its norm before, and its
    loss."""
    expected, actual = first.gradients(reference), second.gradients(other)
    assert expected.keys() == actual.keys()
    for name in expected:
        assert (actual[name] - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-12, name
    (whole,), (part,) = (steps(parts / name) for name in (reference, other))
    counted = [name for name in whole if name.startswith(("rollout/", "parse/", "match/", "target/"))]
    assert {name: part[name] for name in counted} == {name: whole[name] for name in counted}
    assert whole["match/missed"] > 0
    assert part["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert part["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)
    assert whole["grad_norm"] > 2 * SIX_SAMPLES["training__max_grad_norm"]


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_processes_take_the_step_that_one_takes_on_the_same_samples(parts, by_one, by_two, mode):
    assert all(by_two(mode, rank)["sharded"] == (mode == "fsdp2") for rank in range(2))
    together = [image for rank in range(2) for image in by_two(mode, rank)["taken"]]
    assert sorted(together) == sorted(by_one("micro-steps")["taken"])
    same_step(parts, by_one, "micro-steps", by_two, mode)


def same_run(run: Path, other: Path, last: int) -> None:
    expected, actual = (weights(folder / f"checkpoint-{last}") for folder in (run, other))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert steps(run) == steps(other)
    assert [line["step"] for line in steps(run)] == list(range(1, last + 1))


def test_a_mix_of_rollouts_alone_is_the_rollout_trainer_bit_for_bit(parts, by_one):
    same_run(parts / "aligned", parts / "all-b", last=3)


def test_a_mix_without_rollouts_is_stage_1_bit_for_bit(parts, by_one):
    same_run(parts / "stage1", parts / "all-a", last=3)
    assert not any("rollout/answers" in line for line in steps(parts / "all-a"))


@pytest.mark.parametrize("name", ["mixed", "mixed-resumed", "mixed-by-two"])
def test_which_steps_take_rollouts_depends_on_their_number_alone(parts, by_one, by_two, name):
    lines = steps(parts / name)
    assert [line["step"] for line in lines if "rollout/answers" in line] == [2, 4, 6]
    assert len(lines) == 6
    seen = (by_two if name == "mixed-by-two" else by_one)(name)
    assert {channel for row in seen["trained"] for _, channel in row} == {"A", "B"}


def test_a_mixed_run_that_is_resumed_is_the_uninterrupted_one(parts, by_one):
    assert json.loads((parts / "mixed-resumed/checkpoint-3/stream_0.json").read_text())["rows"] == 6
    assert len(by_one("mixed-resumed")["trained"]) == 6
    same_run(parts / "mixed", parts / "mixed-resumed", last=6)


@pytest.mark.scenario("R07.C11", on="processes")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("damaged-picture", "images/val/0000001.png: not a readable image"),
        ("damaged-record", "no-record/train.jsonl"),
    ],
)
def test_an_error_of_one_rank_is_the_same_error_on_all(by_two, name, words):
    """The error occurs in evaluation, and while a sharded model generates."""
    other, own = (by_two(name, rank)["error"] for rank in range(2))
    assert words in own
    assert other == f"RankError: rank 1 failed, so all ranks stop\n  {own}"


SAMPLED = {
    "global_max_length": 160,
    "rollout_matching__decoding__temperature": 0.7,
    "training__max_steps": 12,
    "training__save_steps": 6,
    "training__gradient_accumulation_steps": 1,
    "training__per_device_train_batch_size": 2,
}


@pytest.fixture(scope="module")
def sampled(parts):
    """Make a run with two processes that sample."""
    finish(training(config(parts, "sampled", **SAMPLED)), processes=2)
    return parts / "sampled"


@pytest.fixture(scope="module")
def killed(parts):
    """Make the same run, kill its rank 1 after the checkpoint in the middle, and return what it printed and
    left."""
    log = parts / "killed/metrics.jsonl"
    with started(training(config(parts, "killed", **SAMPLED)), processes=2) as run:
        while not (log.is_file() and log.read_text().count("\n") >= 8):
            assert run.process.poll() is None, run.shown
            assert run.seconds < 400, run.shown
            time.sleep(0.1)
        pid = run.rank(1)
        os.kill(pid, signal.SIGKILL)
        code = run.wait(60)
        return {"pid": pid, "code": code, "shown": run.shown, "left": run.remains()}


def test_a_killed_rank_ends_the_run_within_a_minute_and_leaves_nothing(killed):
    assert killed["code"] != 0
    assert not killed["left"]
    assert "rank 0 lost another rank and cannot go on" in killed["shown"]
    assert f"exitcode  : -9 (pid: {killed['pid']})" in killed["shown"]


def test_if_torchrun_is_killed_its_ranks_end(parts):
    with started(training(config(parts, "orphaned", **SAMPLED)), processes=2) as run:
        wait_for(lambda: run.shown.count("loading") >= 2, 120, lambda: run.shown)
        os.kill(run.process.pid, signal.SIGKILL)
        assert run.wait(10) == -signal.SIGKILL
        assert not run.remains()


def test_a_killed_run_that_goes_on_from_its_checkpoint_does_what_the_uninterrupted_one_does(
    parts, sampled, killed
):
    """They are equal bit for bit, with segments that wait at the checkpoint on both ranks."""
    for rank in range(2):
        assert "0.ids" in load_file(parts / f"killed/checkpoint-6/carry_{rank}.safetensors")
    assert "checkpoint-6" in finish(training(parts / "killed.yaml", "--resume"), processes=2)
    same_run(sampled, parts / "killed", last=12)


def test_sampled_answers_differ_over_ranks_and_steps(sampled):
    """Otherwise a resumed run would sample the same answers whatever its seeds are made of."""
    lines = [line for line in steps(sampled) if "rollout/answers" in line]  # in others enough was waiting
    assert all(line["rollout/decoded/sampling"] == line["rollout/answers"] > 0 for line in lines)
    assert len({line["rollout/tokens"] for line in lines}) > 5


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_a_model_that_two_processes_hold_answers_as_it_does_in_one(parts, by_two, mode):
    """This holds also if one process has fewer requests than the other, or none, even in the first call."""
    alone = backend(MODEL, whole_model(MODEL))
    reasons = set()
    for rank in range(2):
        for call, rollouts in zip(calls(parts), by_two(f"held-{mode}", rank)["calls"], strict=True):
            expected = answers(alone, call["pictures"][rank], call["decode"])
            assert [(ids, reason) for ids, _, reason in rollouts] == [(ids, reason) for ids, _, reason in expected]
            for (_, logprobs, reason), (_, own, _) in zip(rollouts, expected, strict=True):
                assert logprobs == pytest.approx(own, abs=1e-4)
                reasons.add(reason)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_ranks_that_fail_together_while_they_answer_are_still_in_step(by_two, mode):
    other, own = (by_two(f"held-{mode}", rank) for rank in range(2))
    assert "damaged.png: not a readable image" in own["error"]
    assert other["error"] == f"RankError: rank 1 failed, so all ranks stop\n  {own['error']}"
    assert all(seen["after"] == seen["calls"][0] for seen in (other, own))


def test_a_run_of_two_processes_goes_on_with_one_if_a_step_has_as_many_samples(tmp_path):
    """Both processes have taken samples, and examples wait for a row on both."""
    draw(tmp_path)
    sizes = {"training__save_steps": 3, "training__per_device_train_batch_size": 3}
    first = {"training__max_steps": 3, "training__gradient_accumulation_steps": 1}
    finish(training(config(tmp_path, "run", **sizes, **first)), 2)
    then = {"training__max_steps": 6, "training__gradient_accumulation_steps": 2}
    shown = finish(training(config(tmp_path, "run", **sizes, **then), "--resume"))
    assert "checkpoint-3" in shown
    assert [line["step"] for line in steps(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    states = [
        json.loads((tmp_path / "run" / name).read_text())
        for name in ("checkpoint-3/stream_0.json", "checkpoint-3/stream_1.json", "checkpoint-6/stream_0.json")
    ]
    assert states[2]["begin"] == 2 * min(state["taken"] for state in states[:2]) and states[2]["rows"] == 12
