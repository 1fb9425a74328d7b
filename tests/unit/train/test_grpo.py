"""The reward of `tools/grpo.py`, and what TRL makes of it. Tests that need TRL are skipped where it is missing: it
is not part of the environment."""

import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration
from typer.testing import CliRunner

from coordexp.cli import app
from coordexp.correction import CoordTokenAnswers
from coordexp.data import Record, RecordFile, read_records
from coordexp.data.records import RecordObject
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.evaluate import evaluate
from coordexp.evaluate.answer import build_answer
from coordexp.pages.run_folder import read_run
from coordexp.rollout.backend import Rollout
from coordexp.rollout.prompt import PromptBuilder
from coordexp.vocab import VocabularyTable
from tests.vocabularies import encode, table

SPEC = importlib.util.spec_from_file_location("grpo", "tools/grpo.py")
grpo = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(grpo)

MODEL = Path("examples/stage2-cpu/model").resolve()
SMALL = table("small")
CUP, DOG = ("cup", (100, 100, 300, 300)), ("dog", (500, 500, 900, 900))
EXTRA = ("cup", (700, 0, 800, 90))


def record(*objects):
    return Record("a.png", 64, 64, "bin", tuple(RecordObject(desc, "bbox_2d", bins) for desc, bins in objects))


def answer(*objects):
    entries = {
        f"object_{k}": {"desc": desc, "bbox_2d": [f"<|coord_{bin}|>" for bin in bins]}
        for k, (desc, bins) in enumerate(objects, start=1)
    }
    return json.dumps(entries)


def reward(text, *objects):
    return grpo.reward_answer(encode(text, SMALL), 1, record(*objects), SMALL)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (answer(CUP, DOG), 1.0),
        (answer(DOG, CUP), 1.0),
        (answer(CUP), 2 / 3),
        (answer(CUP, DOG, EXTRA), 4 / 5),
        (answer(CUP, CUP, DOG), 4 / 5),
        (answer(CUP, ("cat", DOG[1])), 1 / 2),
        (answer(CUP, DOG)[:-5], 2 / 3),  # cut off inside the second object
        ("{}", 0.0),
        ("cup", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_f1_of_the_valid_objects_with_class(text, expected):
    assert reward(text, CUP, DOG) == pytest.approx(expected)


@pytest.mark.parametrize("text", [answer(CUP), answer(CUP, DOG, EXTRA), answer(EXTRA), answer(CUP, DOG)[:-5]])
def test_the_reward_is_what_evaluation_reports_for_the_same_image(text):
    ids, truth = encode(text, SMALL), record(CUP, DOG)
    rollout = Rollout.of(SMALL, (), ids, [0.0] * len(ids), "stop")
    report = evaluate([(1, truth)], [build_answer(1, "a.png", rollout, CoordTokenAnswers(SMALL))])
    assert reward(text, CUP, DOG) == report.metrics()["f1_50"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{}", 1.0), (answer(CUP), 0.0), ("cup", 0.0), ("", 0.0), ("{", 0.0), ('{"object_1": 5}', 0.0)],
)
def test_on_an_empty_image_only_a_complete_answer_without_objects_is_rewarded(text, expected):
    assert reward(text) == expected


def test_tokens_are_counted_without_the_end_of_turn_and_the_count_goes_on(tmp_path):
    (tmp_path / "a.jsonl").write_text(record(CUP, DOG).as_json() + "\n")
    f1 = grpo.F1Reward(RecordFile(tmp_path / "a.jsonl"), SMALL)
    whole = encode(answer(CUP, DOG), SMALL)
    cut, logged = whole[:-3], {}
    for _ in range(2):
        rewards = f1.score([[*whole, SMALL.end_of_turn], cut], index=[0, 0], log_metric=logged.__setitem__)
    assert rewards == [1.0, pytest.approx(2 / 3)]
    assert logged["rollout/tokens"] == len(whole) + len(cut)
    assert logged["rollout/mean_tokens"] == (len(whole) + len(cut)) / 2
    assert logged["generated_tokens"] == 2 * (len(whole) + len(cut))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with scenes of two sizes, so that prompts differ in length."""
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("grpo")
    for side in (96, 128):
        settings = SceneSettings(side=side, objects=(2, 4))
        write_scenes(folder / str(side), settings, train=1, val=2, seed=side)
    for name in ("train", "val"):
        records = [
            (side, record) for side in (96, 128) for _, record in read_records(folder / f"{side}/{name}.jsonl")
        ]
        lines = [replace(record, image=f"{side}/{record.image}").as_json() for side, record in records]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def options(folder, **changes):
    values = {
        "model": MODEL,
        "train": folder / "train.jsonl",
        "val": folder / "val.jsonl",
        "out": folder / "out",
        "steps": 2,
        "group": 4,
        "images-per-step": 2,
        "max-new-tokens": 160,
        **changes,
    }
    return grpo.read_options([text for name, value in values.items() for text in (f"--{name}", str(value))])


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # those of TRL
def test_the_gradient_of_a_step_is_that_of_the_loss_computed_by_hand(folder):
    kl, temperature = 0.1, 1.2
    trainer = grpo.make_trainer(options(folder, kl=kl, temperature=temperature))
    model, start = trainer.model, load_model()
    with torch.no_grad():  # so that the divergence from the start is not zero
        for weight in model.parameters():
            weight.add_(0.02 * weight.std(correction=0) * torch.randn_like(weight))
    by_hand = load_model()
    by_hand.load_state_dict(model.state_dict())
    model.train()
    trainer.current_gradient_accumulation_steps = 1  # the training loop sets it
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.compute_loss(model, inputs).backward()

    records = RecordFile(folder / "train.jsonl")
    prompts = PromptBuilder(AutoProcessor.from_pretrained(MODEL), grpo.read_question(MODEL))
    rows = read_rows(inputs, records, prompts)
    rewards = torch.tensor([row_reward(row, records) for row in rows])
    assert len(rewards.unique()) > 2 and len({len(row.answer) for row in rows}) > 1, "the case is too easy"
    advantages = torch.zeros(len(rows))
    for index in (0, 1):
        group = [k for k, row in enumerate(rows) if row.index == index]
        assert len(group) == 4
        advantages[group] = (rewards[group] - rewards[group].mean()) / (rewards[group].std() + 1e-4)
    torch.testing.assert_close(inputs["advantages"], advantages, rtol=1e-5, atol=1e-5)

    loss = torch.zeros(())
    for row, advantage in zip(rows, advantages, strict=True):
        now = logprobs(by_hand, row, temperature)
        change = logprobs(start, row, temperature).detach() - now
        assert change.abs().max() > 1e-3, "the divergence is too small to be tested"
        loss = loss - (advantage * now).sum() + kl * (change.exp() - change - 1).sum()
    (loss / sum(len(row.answer) for row in rows)).backward()
    for (name, weight), expected in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        difference = (weight.grad - expected.grad).norm() / expected.grad.norm()
        assert difference < 1e-4, f"{name}: the gradients differ by {difference:.1e} of their norm"


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_a_run_leaves_metrics_and_a_model_that_predicts_what_was_evaluated(folder, tmp_path):
    out = tmp_path / "out"
    grpo.train(options(folder, out=out, **{"max-new-tokens": 60, "learning-rate": 1e-3, "eval-every": 1}))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluations = {line["step"]: line for line in lines if "eval_f1_50" in line}
    steps = {line["step"]: line for line in lines if "reward" in line}
    assert sorted(evaluations) == [0, 1, 2] and sorted(steps) == [1, 2]
    assert steps[2]["generated_tokens"] == steps[1]["rollout/tokens"] + steps[2]["rollout/tokens"]
    assert "train_runtime" in lines[-1]
    assert read_run(out).training == {"output_dir": str(out), "seed": 0, "max_steps": 2}
    assert {path.name for path in (out / "checkpoint-2").iterdir()} == {path.name for path in MODEL.iterdir()}
    predictions = str(tmp_path / "predictions.json")
    arguments = ["--model", out / "checkpoint-2", "--data", folder / "val.jsonl", "--out", predictions]
    result = CliRunner().invoke(app, ["predict", *map(str, arguments), "--max-new-tokens", "60"])
    assert result.exit_code == 0, result.output
    assert json.loads(Path(predictions).read_text()) == json.loads((out / "evaluations/step-2.json").read_text())


@dataclass(frozen=True)
class Row:
    """An answer of a batch, and the record that it is about."""

    index: int
    prompt: list[int]
    answer: list[int]  # with its end of turn
    pixels: tuple[torch.Tensor, torch.Tensor]


def read_rows(inputs, records, prompts):
    """Return the answers of TRL's batch. Fail if its prompts or pixels are not those of `coordexp train`."""
    candidates = [prompts.pixels(records.image_path(record), (record.width, record.height)) for record in records]
    grids = inputs["image_grid_thw"]
    rows = []
    for k, pixels in enumerate(inputs["pixel_values"].split(grids.prod(-1).tolist())):
        (index,) = [i for i, (own, _) in enumerate(candidates) if torch.equal(own, pixels)]
        prompt, answer = (
            inputs[f"{part}_ids"][k][inputs[f"{part}_mask"][k].bool()].tolist()
            for part in ("prompt", "completion")
        )
        assert prompt == prompts.ids(records[index].width, records[index].height)
        rows.append(Row(index, prompt, answer, candidates[index]))
    return rows


def row_reward(row, records):
    vocabulary = VocabularyTable.from_folder(MODEL)
    ids = [id for id in row.answer if id != vocabulary.end_of_turn]
    return grpo.reward_answer(ids, *records.read_with_image_id(row.index), vocabulary)


def logprobs(model, row, temperature):
    """Return the log probabilities of the answer, from a forward pass without padding."""
    ids = torch.tensor([row.prompt + row.answer])
    pixels, grid = row.pixels
    images = (ids == model.config.image_token_id).int()
    logits = model(input_ids=ids, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=images).logits
    scores = (logits[0, len(row.prompt) - 1 : -1] / temperature).log_softmax(-1)
    return scores.gather(1, ids[0, len(row.prompt) :, None])[:, 0]


def load_model():
    return Qwen3VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32)
