"""What the model said of a dumped example when it was trained on it: numbers, files, and what waits for its row.

Answers are scripted and logits random; everything between them is the trainer's own.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from coordexp.correction import Role
from coordexp.data import BINS
from coordexp.objective import Objective, Tally
from coordexp.pack import CarryBuffer
from coordexp.pack.collate import Collator
from coordexp.train.dump_folder import DumpFolder
from coordexp.train.encode import Moment
from coordexp.train.stream import Order, RowStream
from coordexp.train.trace import Traces, runs, traced
from coordexp.train.trainer import RowTrainer
from tests.dumped import SMALL, TRUTH, dumping
from tests.rows import DIAGNOSTICS, settings

FIRST, SIZE = SMALL.first_coord, len(SMALL.pieces)
OBJECTIVE = Objective(settings(diagnostics=DIAGNOSTICS), first_coord=FIRST)
NO_PICTURE = torch.ones(0, 3), torch.zeros(1, 3, dtype=torch.int64)
COLLATE = Collator(
    lambda ids, **_: (torch.zeros(3, 1, ids.shape[1], dtype=torch.int64), None),
    SIZE,
    2,
    lambda *_: NO_PICTURE,
    OBJECTIVE.roles(),
)


@pytest.fixture
def examples(tmp_path):
    """Three of a step, each in line with its number of `step-000000.jsonl`."""
    return dumping(tmp_path)[0](range(len(TRUTH)), Moment(0, 0))


def logits_for(row, seed=0) -> torch.Tensor:
    return torch.randn(len(row.supervision.ids), SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def trained(row, logits, trace=lambda *_: None, done=0) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient when this row is a whole step, after `done` others."""
    trainer = RowTrainer.__new__(RowTrainer)
    trainer.objective, trainer.tally, trainer.trace = OBJECTIVE, Tally(OBJECTIVE), trace
    trainer.state = SimpleNamespace(global_step=done)
    leaf = logits.clone().requires_grad_()
    loss = trainer.compute_loss(lambda **_: SimpleNamespace(logits=leaf[None]), row, num_items_in_batch=row.counts)
    loss.backward()
    return loss.detach(), leaf.grad


def lines(folder: Path, name="trained-000000.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / "dumps" / name).read_text().splitlines()]


def traces(folder: Path) -> Traces:
    return Traces(OBJECTIVE, DumpFolder(folder / "dumps", folder / "model"))


def trace_of(example, logits=None) -> tuple[dict, torch.Tensor]:
    """The trace of an example alone, and its logits."""
    row = COLLATE([example])
    logits = logits_for(row) if logits is None else logits
    return traced(OBJECTIVE, row.watched[0], logits, row.supervision), logits


def test_a_trace_has_the_loss_that_the_trainer_computes_when_the_example_is_the_whole_step(tmp_path, examples):
    row = COLLATE([examples[2], replace(examples[1], dumped=""), examples[0]])
    logits = logits_for(row)
    trained(row, logits, traces(tmp_path))
    found = lines(tmp_path)
    assert [line["example"] for line in found] == [2, 0]
    for line, watched in zip(found, row.watched, strict=True):
        alone = COLLATE([examples[line["example"]]])
        loss, _ = trained(alone, logits[watched.kept])
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-6)
        assert line["loss"] > 1


def test_terms_are_weighted_sum_to_the_loss_and_leave_diagnostics_out(examples):
    found, _ = trace_of(examples[0])
    assert set(found["terms"]) == {term.name for term in OBJECTIVE.terms if term.weight is not None}
    assert not any(name.startswith("coord_diag") for name in found["terms"])
    assert sum(found["terms"].values()) == pytest.approx(found["loss"], rel=1e-6)


def test_tokens_have_the_plain_cross_entropy_of_the_whole_vocabulary(examples):
    example = examples[0]
    found, logits = trace_of(example)
    segment = example.segment
    assert found["where"] == np.flatnonzero(segment.weights).tolist()
    assert found["where"][0] >= segment.prompt_length
    log_p = logits.double().log_softmax(-1)
    ids = torch.from_numpy(segment.ids[found["where"]])
    assert found["nll"] == pytest.approx((-log_p.gather(1, ids[:, None])[:, 0]).tolist(), abs=1e-4)
    mass = log_p.exp()[:, FIRST : FIRST + BINS].sum(-1)
    assert found["mass"] == pytest.approx(mass.tolist(), abs=1e-4)


def test_the_bins_of_coordinates_sum_to_what_was_not_left_out(examples):
    example = examples[0]
    row = COLLATE([example])
    logits = logits_for(row)
    logits[:, FIRST : FIRST + BINS] += 8 - 0.02 * (torch.arange(BINS) - 300).abs()
    found, _ = trace_of(example, logits)
    roles = example.segment.roles
    coords = [at for at in found["where"] if roles[at] in (Role.matched_coord, Role.tail_coord)]
    assert [int(at) for at in found["bins"]] == coords
    for at, listed in found["bins"].items():
        p = logits[found["where"].index(int(at)), FIRST : FIRST + BINS].double().softmax(-1)
        shown = {first + k: value for first, *values in listed for k, value in enumerate(values)}
        assert set(shown) == set(torch.nonzero(p >= 5e-4)[:, 0].tolist())
        assert all(abs(value - 1e4 * p[bin]) <= 0.51 for bin, value in shown.items())
        left_out = 1 - float(p[list(shown)].sum())
        assert sum(shown.values()) / 1e4 == pytest.approx(1 - left_out, abs=0.5e-4 * len(shown))
        assert 0 < left_out < 0.5


def test_neighbouring_bins_are_one_run():
    p = np.zeros(BINS)
    p[[0, 1, 500, 998, 999]] = 0.25, 0.2496, 0.1, 0.4, 0.0004
    assert runs(p) == [[0, 2500, 2496], [500, 1000], [998, 4000]]
    assert runs(np.full(BINS, 1e-4)) == []


def test_logits_that_are_no_numbers_are_null_where_they_stand(tmp_path, examples):
    row = COLLATE([examples[0]])
    logits = logits_for(row)
    sound, _ = trace_of(examples[0], logits)
    is_coord = [str(position) in sound["bins"] for position in sound["where"]]
    coord, text = is_coord.index(True), is_coord.index(False)
    logits[coord, 3], logits[text, 5] = math.nan, math.inf
    logits[-1, row.supervision.ids[-1]] = -math.inf
    trained(row, logits, traces(tmp_path))
    (found,) = lines(tmp_path)
    for at in range(len(found["where"])):
        spoilt = at in (coord, text)
        assert found["mass"][at] == (None if spoilt else pytest.approx(sound["mass"][at], abs=0.1))
        assert (found["nll"][at] is None) == (spoilt or at == len(found["where"]) - 1)
    assert str(found["where"][coord]) not in found["bins"]
    assert len(found["bins"]) == len(sound["bins"]) - 1
    all_broken, _ = trace_of(examples[0], torch.full_like(logits, math.nan))
    assert set(all_broken["nll"]) == set(all_broken["mass"]) == {None}
    assert all_broken["bins"] == {}


def test_a_trace_of_half_precision_is_computed_in_single(examples):
    row = COLLATE([examples[0]])
    half = logits_for(row).bfloat16()
    (found, _), (single, _) = trace_of(examples[0], half), trace_of(examples[0], half.float())
    assert found["loss"] == pytest.approx(single["loss"], rel=1e-6)
    assert {name: found[name] for name in ("nll", "mass", "bins")} == {
        name: single[name] for name in ("nll", "mass", "bins")
    }


def test_an_example_of_which_nothing_is_supervised_has_an_empty_trace(examples):
    masked = replace(examples[0].segment, weights=np.zeros(len(examples[0]), dtype=np.float32))
    found, _ = trace_of(replace(examples[0], segment=masked))
    assert found["loss"] == 0
    assert [found[name] for name in ("where", "nll", "mass", "bins")] == [[], [], [], {}]


def test_a_step_is_the_same_to_the_bit_with_a_trace_and_without(tmp_path, examples):
    row = COLLATE(examples)
    logits = logits_for(row)
    (loss, gradient), (plain, expected) = trained(row, logits, traces(tmp_path)), trained(row, logits)
    assert len(lines(tmp_path)) == 3
    assert torch.equal(loss, plain)
    assert torch.equal(gradient, expected)
    assert gradient.abs().sum() > 0


def test_nothing_is_traced_of_a_row_without_dumped_examples(examples):
    row = COLLATE([replace(example, dumped="") for example in examples])
    assert row.watched == ()

    def refuse(*_):
        raise AssertionError("there is nothing to trace")

    trained(row, logits_for(row), refuse)


def test_a_line_says_its_step_as_the_log_counts_and_stands_beside_its_dump(tmp_path, examples):
    followed = replace(examples[1], dumped="followed/step-000123.jsonl:4")
    row = COLLATE([followed])
    trained(row, logits_for(row), traces(tmp_path), done=123)
    (line,) = lines(tmp_path, "followed/trained-000123.jsonl")
    assert (line["format"], line["example"], line["step"]) == (1, 4, 124)
    assert set(line) == {"format", "example", "step", "loss", "terms", "where", "nll", "mass", "bins"}


LENGTH = 150  # the examples have 146, 39 and 74 tokens


def stream(folder: Path) -> RowStream:
    """Three answers a row, of which not all fit; the first step alone is dumped."""
    encode, _ = dumping(folder, every=100)
    order = Order(len(TRUTH), 0, 1, seed=1, shuffled=False)
    return RowStream(order, encode, 3, CarryBuffer(LENGTH, 9), max_length=LENGTH)


def train(of: RowStream, trace: Traces, first: int, last: int) -> None:
    rows = iter(of)
    for step in range(first, last):
        row = COLLATE(next(rows))
        trained(row, logits_for(row, seed=step), trace, done=step)


@pytest.mark.parametrize("resumed", [False, True])
def test_an_example_that_waits_is_traced_when_its_row_comes_also_after_a_resume(tmp_path, resumed):
    of = stream(tmp_path)
    train(of, traces(tmp_path), 0, 1)
    (first,) = lines(tmp_path)
    waiting = [example.dumped for example, _ in of.buffer.waiting]
    assert sorted([*waiting, f"step-000000.jsonl:{first['example']}"]) == [
        f"step-000000.jsonl:{k}" for k in range(3)
    ]
    if resumed:
        of.save(tmp_path)
        of = stream(tmp_path)
        of.load(tmp_path)
    train(of, traces(tmp_path), 1, 4)
    found = lines(tmp_path)
    assert sorted(line["example"] for line in found) == [0, 1, 2]
    assert [line["step"] for line in found] == sorted(line["step"] for line in found)
    assert found[-1]["step"] > 1
