"""One optimizer step on one rank: rollouts, examples, rows, losses and gradients.

The Hugging Face Trainer has the loop, the optimizer and the schedule. Once per optimizer step it calls
`make_rows`, which makes the rows of all micro-steps. Then it gets each row with `load`, computes its loss with
`compute_loss`, and runs the backward pass. The losses of all rows are shares of one sum, so their gradients add up
to that of the step.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from coordexp.config import RolloutContract
from coordexp.data import stores
from coordexp.data.sets import list_addresses
from coordexp.data.stores import read_ahead
from coordexp.objective.carry import Example, split_in_order
from coordexp.objective.collate import Collator, Row, kind_counts
from coordexp.objective.pipeline import LossTally, Objective, SetTally, gradient_scale, reduce_counts
from coordexp.objective.split import Split, SplittingHead
from coordexp.ranks import max_over_ranks, together
from coordexp.tasks import Task
from coordexp.train.rollouts import RolloutSource

T = TypeVar("T")
Rows = Sequence[tuple[Example, ...]]  # the examples of each row of a micro-step
# Gets a row, the split logits of its supervised positions, and the optimizer step, numbered from 1, as in the log.
Trace = Callable[[Row, Split, int], None]


class OptimizerSteps:
    """The optimizer steps of a run on one rank, one after the other. `set_names` are the names of the data sets,
    if they are mixed. Only a traced run has a `trace`."""

    def __init__(
        self,
        *,
        rollouts: RolloutSource,
        objective: Objective,
        head: SplittingHead,
        loader: "RowLoader",
        rollout_matching_cfg: RolloutContract,
        trace: Trace | None = None,
        set_names: Sequence[str] = (),
    ) -> None:
        self.rollouts, self.objective, self.head, self.loader = rollouts, objective, head, loader
        self.stream, self.encoder, self.metrics = rollouts.stream, rollouts.encoder, rollouts.metrics
        self.rollout_matching_cfg, self.trace = rollout_matching_cfg, trace
        self.tally = LossTally(objective)
        self.set_tally = SetTally(objective, set_names) if set_names else None
        self.tokens = self.steps = 0  # since the last report

    def make_rows(self, device: torch.device) -> tuple[Sequence[Rows], Tensor]:
        """Make the rows of the next optimizer step. Return them by micro-step, and how many tokens of each kind
        their answers have on all ranks. All ranks call this together. Rollouts that are made ahead are asked for
        last, because the examples of this step decide how many samples the next one takes."""
        self.metrics.begin_step()
        micro_steps = self._together(self.collect_examples)
        rows = [self._split_rows(examples) for examples in micro_steps]
        self.loader.begin(itertools.chain(*rows))
        if stores.are_used():
            read_ahead(list_addresses(self.encoder.training_set.records, self.stream.next_records()))
        if self.rollouts.max_staleness:
            self._together(self.rollouts.ask_ahead)
        self.steps += 1
        self.tokens += sum(map(count_tokens, rows))
        return rows, reduce_counts([kind_counts(examples) for examples in micro_steps], device)

    def collect_examples(self) -> list[tuple[Example, ...]]:
        """Return the examples of one optimizer step, by micro-step.

        In Stage 2, the engine gets the current weights, the model answers all samples of the step at once, and the
        answers are corrected. With `stage2.max_staleness`, the answers were made while earlier steps were trained.
        In Stage 1, and on channel A, examples are made from the ground truth. With packing, a row may also have
        examples that waited since an earlier step, so each micro-step is packed before the next one is taken."""
        micro_steps = []
        with self.rollouts.backend.session():
            self.rollouts.make_rollouts()
            for _ in range(self.stream.accumulation):
                batch, rollouts = self.rollouts.next_micro_batch()
                examples = self.encoder.encode(batch, rollouts)
                micro_steps.append(self.stream.pack(examples))
        return micro_steps

    def load(self, examples: tuple[Example, ...]) -> Row:
        """Return the tensors of a row, which were made while the row before it was trained."""
        with self.metrics.measure("pictures", without=("waited",)):
            row = self._together(partial(self.loader.next_row, examples))
        return row.to(self.loader.device)

    def compute_loss(self, model: Any, row: Row, counts: Tensor, number: int) -> Tensor:
        """Return the share that a row has in the loss of the optimizer step `number`, which is counted from 1.
        `counts` are those that `make_rows` returned."""
        request = self.objective.request_split(row.supervision)
        with self.head.splitting(request):
            split = Split(model(**row.inputs).logits[0], request.temperatures)
        measures = self.objective.measure(split, row.supervision)
        self.tally.add(measures, counts)
        if self.set_tally is not None:
            self.set_tally.add(row, split, measures)
        if self.trace is not None:
            self.trace(row, split, number)
        return self.objective.loss(measures, counts) * gradient_scale()

    def report(self) -> dict[str, float]:
        """Return the metrics of all ranks since the last report, and start again from zero. All ranks call
        this."""
        values = self.tally.report(self.steps) | {"tokens": float(self.tokens)}
        values |= self.metrics.report(self.steps)
        values |= self.set_tally.report() if self.set_tally is not None else {}
        self.tokens = self.steps = 0
        return values

    def _split_rows(self, micro_step: tuple[Example, ...]) -> list[tuple[Example, ...]]:
        """Return the rows of a micro-step. With packing there is one, which was drawn under the limit. Without
        packing, a micro-batch with more tokens than a row may have is cut into several rows. DDP and FSDP need
        the same number of passes on every rank, so every rank makes as many rows as the rank that needs the
        most."""
        contract = self.rollout_matching_cfg
        # This needs no collective: without packing, all ranks have equally many examples.
        if contract.packing or len(micro_step) == 1:
            return [micro_step]
        lengths, cap = [len(example) for example in micro_step], contract.packing_length
        passes = max_over_ranks(len(split_in_order(lengths, cap)), waited=self._add_waited)
        return [micro_step[part] for part in split_in_order(lengths, cap, at_least=passes)]

    def _together(self, work: Callable[[], T]) -> T:
        return together(work, waited=self._add_waited)

    def _add_waited(self, seconds: float) -> None:
        self.metrics.add_seconds("waited", seconds)


class RowLoader:
    """Makes the tensors of rows in another thread, one row ahead: the images of the next row are read while a row
    is trained. So at most two rows are in memory. With `image_threads`, the images of a row are read in
    parallel."""

    def __init__(self, collate: Collator, image_threads: int, device: torch.device) -> None:
        self.collate, self.device = collate, device
        self._readers = ThreadPoolExecutor(image_threads) if image_threads else None
        self._rows: deque[tuple[Example, ...]] = deque()
        self._next: tuple[tuple[Example, ...], Task[Row]] | None = None

    def begin(self, rows: Iterable[tuple[Example, ...]]) -> None:
        """Begin with the first of these rows, and to read the images of all that are in stores."""
        self._rows = deque(rows)
        read_ahead(example.image for row in self._rows for example in row if example.image is not None)
        self._load_next()

    def next_row(self, examples: tuple[Example, ...]) -> Row:
        """Return the tensors of a row, which must be the next one, and begin with the one after it."""
        assert self._next is not None and self._next[0] is examples
        row = self._next[1].result()
        self._load_next()
        return row

    def _load_next(self) -> None:
        examples = self._rows.popleft() if self._rows else None
        self._next = (examples, Task(self._load, examples)) if examples is not None else None

    def _load(self, examples: tuple[Example, ...]) -> Row:
        row = self._collate(examples)
        if self.device.type != "cuda":
            return row
        torch.cuda.set_device(self.device)  # this thread would use the first GPU
        return row.pin()

    def _collate(self, examples: tuple[Example, ...]) -> Row:
        sources = [(example.image, example.size) for example in examples if example.image is not None]
        if self._readers is None or not sources:
            return self.collate(examples)
        pixels = self._readers.map(self.collate.pixels, *zip(*sources, strict=True))
        loaded = dict(zip(sources, pixels, strict=True))
        return replace(self.collate, pixels=lambda image, size: loaded[image, size])(examples)


def count_tokens(rows: Rows) -> int:
    return sum(len(example) for row in rows for example in row)
