"""Traces: what the model said about a dumped example when it was trained on it.

Answers are scripted and logits random; everything between them is the trainer's own code.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from coordexp.answers.segment import Role
from coordexp.data import BINS
from coordexp.objective.carry import CarryBuffer, ExampleId
from coordexp.objective.collate import Collator
from coordexp.objective.pipeline import Objective
from coordexp.objective.split import Split, SplittingHead
from coordexp.train.encode import StepIndex
from coordexp.train.metrics import StepMetrics, TraceWriter, trace
from coordexp.train.step import OptimizerSteps
from coordexp.train.stream import RowStream, SampleOrder
from tests.dumped import SMALL, TRUTH, dumping
from tests.rows import DIAGNOSTICS, settings

FIRST, SIZE = SMALL.first_coord, len(SMALL.pieces)
OBJECTIVE = Objective(settings(diagnostics=DIAGNOSTICS), first_coord=FIRST)
NO_PIXELS = torch.ones(0, 3), torch.zeros(1, 3, dtype=torch.int64)
COLLATE = Collator(
    lambda ids, **_: (torch.zeros(3, 1, ids.shape[1], dtype=torch.int64), None),
    SIZE,
    2,
    lambda *_: NO_PIXELS,
    OBJECTIVE.roles(),
)


@pytest.fixture
def dumped(tmp_path):
    """Return three examples of a step, and the writer that dumped them. Each is the line of its number in
    `step-000000.jsonl`."""
    collect, dumps = dumping(tmp_path)
    return collect(range(len(TRUTH)), StepIndex(0, 0)), TraceWriter(OBJECTIVE, dumps)


@pytest.fixture
def examples(dumped):
    return dumped[0]


@pytest.fixture
def writer(dumped):
    return dumped[1]


def logits_for(row, seed=0) -> torch.Tensor:
    return torch.randn(len(row.supervision.ids), SIZE, generator=torch.Generator().manual_seed(seed)) * 3


class FakeModel:
    """A model whose hidden states are the logits: it projects them with an identity."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits, self.projection = logits, torch.nn.Identity()
        text = SimpleNamespace(vocab_size=SIZE)
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.projection

    def __call__(self, **_) -> SimpleNamespace:
        return SimpleNamespace(logits=self.projection(self.logits[None]))


def train_on(row, logits, writer=None, done=0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and gradient when this row is a whole step, after `done` others."""
    leaf, counts = logits.clone().requires_grad_(), sum(span.counts for span in row.spans)
    model = FakeModel(leaf)
    steps = OptimizerSteps(
        rollouts=SimpleNamespace(stream=None, encoder=None, metrics=StepMetrics()),
        objective=OBJECTIVE,
        head=SplittingHead(model),
        loader=None,
        rollout_matching_cfg=None,
        trace=writer,
    )
    loss = steps.compute_loss(model, row, counts, done + 1)
    loss.backward()
    return loss.detach(), leaf.grad


def lines(folder: Path, name="trained-000000.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / "dumps" / name).read_text().splitlines()]


def trace_of(example, logits=None) -> tuple[dict, torch.Tensor]:
    """Return the trace of an example alone, and its logits."""
    row = COLLATE([example])
    logits = logits_for(row) if logits is None else logits
    split = Split.of_logits(logits, OBJECTIVE.request_split(row.supervision))
    return trace(OBJECTIVE, row.spans[0], split, row.supervision), logits


def without_dump(example):
    """Return the example with an id that no dump has."""
    return replace(example, id=ExampleId(0, 9, 0, 0))


def test_a_trace_has_the_loss_that_the_trainer_computes_when_the_example_is_the_whole_step(
    tmp_path, examples, writer
):
    row = COLLATE([examples[2], without_dump(examples[1]), examples[0]])
    logits = logits_for(row)
    train_on(row, logits, writer)
    traces = lines(tmp_path)
    assert [line["example"] for line in traces] == [2, 0]
    for line, span in zip(traces, row.spans[::2], strict=True):
        alone = COLLATE([examples[line["example"]]])
        loss, _ = train_on(alone, logits[span.positions])
        assert line["loss"] == pytest.approx(loss.item(), abs=1e-6)
        assert line["loss"] > 1


@pytest.mark.scenario("R38.S1", on="pure")
def test_tokens_have_the_plain_cross_entropy_of_the_whole_vocabulary(examples):
    example = examples[0]
    values, logits = trace_of(example)
    segment = example.segment
    assert values["where"] == np.flatnonzero(segment.weights).tolist()
    assert values["where"][0] >= segment.prompt_length
    log_p = logits.double().log_softmax(-1)
    ids = torch.from_numpy(segment.ids[values["where"]])
    assert values["nll"] == pytest.approx((-log_p.gather(1, ids[:, None])[:, 0]).tolist(), abs=1e-4)
    mass = log_p.exp()[:, FIRST : FIRST + BINS].sum(-1)
    assert values["mass"] == pytest.approx(mass.tolist(), abs=1e-4)


def test_the_bins_of_coordinates_sum_to_what_was_not_left_out(examples):
    example = examples[0]
    row = COLLATE([example])
    logits = logits_for(row)
    logits[:, FIRST : FIRST + BINS] += 8 - 0.02 * (torch.arange(BINS) - 300).abs()
    values, _ = trace_of(example, logits)
    roles = example.segment.roles
    coords = [at for at in values["where"] if roles[at] in (Role.matched_coord, Role.tail_coord)]
    assert [int(at) for at in values["bins"]] == coords
    for at, listed in values["bins"].items():
        p = logits[values["where"].index(int(at)), FIRST : FIRST + BINS].double().softmax(-1)
        shown = {first + k: value for first, *values in listed for k, value in enumerate(values)}
        assert set(shown) == set(torch.nonzero(p >= 5e-4)[:, 0].tolist())
        assert all(abs(value - 1e4 * p[bin]) <= 0.51 for bin, value in shown.items())
        left_out = 1 - float(p[list(shown)].sum())
        assert sum(shown.values()) / 1e4 == pytest.approx(1 - left_out, abs=0.5e-4 * len(shown))
        assert 0 < left_out < 0.5


def test_a_logit_that_is_not_finite_is_null_at_its_token(tmp_path, examples, writer):
    row = COLLATE([examples[0]])
    logits = logits_for(row)
    sound, _ = trace_of(examples[0], logits)
    is_coord = [str(position) in sound["bins"] for position in sound["where"]]
    coord, text = is_coord.index(True), is_coord.index(False)
    logits[coord, 3], logits[text, 5] = math.nan, math.inf
    logits[-1, row.supervision.ids[-1]] = -math.inf
    train_on(row, logits, writer)
    (values,) = lines(tmp_path)
    for at in range(len(values["where"])):
        is_broken = at in (coord, text, len(values["where"]) - 1)
        assert values["mass"][at] == (None if is_broken else pytest.approx(sound["mass"][at], abs=0.1))
        assert (values["nll"][at] is None) == is_broken
    assert str(values["where"][coord]) not in values["bins"]
    assert len(values["bins"]) == len(sound["bins"]) - 1
    all_broken, _ = trace_of(examples[0], torch.full_like(logits, math.nan))
    assert set(all_broken["nll"]) == set(all_broken["mass"]) == {None}
    assert all_broken["bins"] == {}


LENGTH = 150  # the examples have 146, 39 and 74 tokens


class Process:
    """A process that trains on three answers per step, of which not all fit into a row. Step 0 alone is dumped."""

    def __init__(self, folder: Path) -> None:
        collect, dumps = dumping(folder, every=100)
        order = SampleOrder(len(TRUTH), 0, 1, seed=1, shuffled=False)
        self.stream = RowStream(order, 3, CarryBuffer(LENGTH, 9), max_length=LENGTH)
        self.steps = collect.on(self.stream)
        self.writer = TraceWriter(OBJECTIVE, dumps)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            row = COLLATE(self.steps.collect_examples()[0])
            train_on(row, logits_for(row, seed=step), self.writer, done=step)


def test_an_example_that_waits_is_traced_when_its_row_comes(tmp_path):
    process = Process(tmp_path)
    process.train(0, 1)
    (first,) = lines(tmp_path)
    waiting = [process.writer.dumps.find(example.id) for example, _ in process.stream.buffer.waiting]
    assert sorted([*waiting, ("step-000000.jsonl", first["example"])]) == [
        ("step-000000.jsonl", k) for k in range(3)
    ]
    process.stream.save(tmp_path)
    process.train(1, 4)
    traces = lines(tmp_path)
    assert sorted(line["example"] for line in traces) == [0, 1, 2]
    assert [line["step"] for line in traces] == sorted(line["step"] for line in traces)
    assert traces[-1]["step"] > 1
    resumed = Process(tmp_path)  # its examples were dumped by the process before, so it traces none of them
    resumed.stream.load(tmp_path)
    resumed.train(1, 4)
    assert lines(tmp_path) == traces
