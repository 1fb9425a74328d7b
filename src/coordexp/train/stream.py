"""The order of samples and the packing of rows on one rank, and their state in a checkpoint.

The order of samples is a pure function of seed and epoch. A checkpoint has how many samples were taken, how many
micro-steps were begun (`rows`) and what waits in the carry buffer, so a resumed run trains on the very rows that
the interrupted one would have trained on.
"""

import itertools
import json
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from coordexp.answers.segment import Segment
from coordexp.errors import DataError, explain
from coordexp.files import write_whole
from coordexp.objective.carry import CarryBuffer, Example, ExampleId, PackingError
from coordexp.train.encode import StepPlan
from coordexp.train.metrics import StepMetrics
from coordexp.train.mixture import Mixture
from coordexp.train.quarantine import Quarantine

FORMAT = 2  # of the carry buffer in a checkpoint
_STREAMS = tuple(field.name for field in fields(Segment) if field.name != "prompt_length")
RECENT = 0.9  # the weight of an earlier micro-batch, in the mean length, against the one after it
GOLDEN_RATIO = 0x9E3779B97F4A7C15  # 2**64 times its fractional part; its multiples spread evenly
# Records of a stage or set up to which an epoch is shuffled as an array: it has 4 MB and takes 0.1 s then.
SHUFFLED = 1_000_000
ROUNDS = 6  # of a keyed permutation, which make it uniform from about 150 records on


@dataclass(frozen=True)
class StageRecords:
    """The records of one stage of a curriculum. For `samples` samples, counted over all ranks, only these are
    taken."""

    samples: int
    records: NDArray[np.integer[Any]]


def _no_length(record: int) -> int:
    return 0


def _never(record: int) -> bool:
    return False


class KeyedPermutation:
    """A permutation of any number of records, each place of which is computed by itself, so it needs no memory.

    The numbers of the places stand in a table, row by row. A round rotates every column by a distance that its
    number and a key decide, and then every row. After the rounds, the number in a cell says which record comes at
    its place. The last row may be too long: a number beyond the records is a cell that is looked up in turn. (A
    Feistel network with cycle walking.)"""

    def __init__(self, records: Sequence[int] | NDArray[np.integer[Any]], random: np.random.Generator) -> None:
        self._records = records
        self._rows = math.isqrt(len(records) - 1) + 1
        self._columns = -(-len(records) // self._rows)
        self._keys = random.integers(2**64, size=(ROUNDS // 2, 2), dtype=np.uint64).tolist()

    def __getitem__(self, place: int) -> int:
        while True:
            row, column = divmod(place, self._columns)
            for key_of_column, key_of_row in self._keys:
                row = (row + _mix(column ^ key_of_column)) % self._rows
                column = (column + _mix(row ^ key_of_row)) % self._columns
            place = row * self._columns + column
            if place < len(self._records):
                return int(self._records[place])


def _mix(value: int) -> int:
    """Return 64 bits, each of which depends on all 64 bits of the value (the last step of SplitMix64)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


class SampleOrder:
    """The order in which a rank takes records: a pure function of how many it has taken. The ranks take turns.

    Each stage of a curriculum and each data set of a mixture has epochs of its own: each of its records is taken
    once per epoch, in another order every time. Stages follow one another. The sets of a mixture alternate in
    proportion to their shares, and their records are numbered one set after the other.

    If the number of ranks has changed, the ranks take turns from the place `begin` on. The later places in `done`
    were taken before the change, and are left out."""

    def __init__(
        self,
        records: int,
        rank: int,
        ranks: int,
        *,
        seed: int,
        shuffled: bool,
        stages: Sequence[StageRecords] = (),
        mixture: Mixture | None = None,
    ) -> None:
        self.records, self.rank, self.ranks, self.seed, self.shuffled = records, rank, ranks, seed, shuffled
        self.begin = 0
        self.leave_out(())
        self._stages = tuple(stages)
        self._mixture = mixture
        self._groups: list[NDArray[np.integer[Any]] | range] = [np.asarray(stage.records) for stage in stages]
        bounds = [0, *itertools.accumulate(mixture.sizes if mixture else (records,))]
        self._groups += [range(begin, end) for begin, end in itertools.pairwise(bounds)]
        # The latest epoch of a group, and its records in their order.
        self._permutations: dict[int, tuple[int, NDArray[np.uint32] | KeyedPermutation]] = {}

    def index(self, taken: int, is_broken: Callable[[int], bool] = _never) -> int:
        """Return the record that this rank takes after `taken` others. In place of a broken one, it takes the next
        one of the same epoch and of the same stage or set."""
        position = self.position(taken)
        if self._mixture is not None:
            return self._record_at(*self._mixture.locate(position), is_broken)
        for number, stage in enumerate(self._stages):
            if position < stage.samples:
                return self._record_at(number, position, is_broken)
            position -= stage.samples
        return self._record_at(len(self._stages), position, is_broken)

    def position(self, taken: int) -> int:
        """Return the place, in the order of all samples, of the one that this rank takes after `taken` others."""
        place = self.begin + self._turn(taken)
        return place + bisect_right(self._before, place)

    def continue_from(self, orders: Sequence["SampleOrder"], taken: Sequence[int]) -> None:
        """Go on where the ranks of an earlier process group have stopped, each of which has taken so many."""
        following = [order.position(count) for order, count in zip(orders, taken, strict=True)]
        self.begin, done = min(following), list[int]()
        for order, count in zip(orders, taken, strict=True):
            places = map(order.position, reversed(range(count)))
            done += itertools.takewhile(lambda place: place > self.begin, places)
        self.leave_out([*done, *(place for place in orders[0].done if place > self.begin)])

    def leave_out(self, done: Sequence[int]) -> None:
        """Leave out places that were taken before."""
        self.done = tuple(sorted(done))
        self._before = [place - number for number, place in enumerate(self.done)]

    def describe(self) -> dict[str, Any]:
        """Return the facts that must be the same after a resume."""
        mixture = self._mixture
        stages = [[stage.samples, len(stage.records)] for stage in self._stages]
        sets = [list(pair) for pair in zip(mixture.shares, mixture.sizes, strict=True)] if mixture else None
        own = {name: getattr(self, name) for name in ("records", "rank", "ranks", "seed", "shuffled")}
        # Checkpoints of versions that shuffled any number of records do not have it.
        keyed = {"permutation": "keyed"} if self.shuffled and max(map(len, self._groups)) > SHUFFLED else {}
        return own | {"stages": stages, "sets": sets} | keyed

    def _turn(self, taken: int) -> int:
        """Return how many samples all ranks take before the one that this rank takes after `taken` others. In a
        mixture, which rank begins changes without a period. Otherwise, two ranks that train on two sets with equal
        shares would have one set each."""
        first = (taken * GOLDEN_RATIO % 2**64) * self.ranks >> 64 if self._mixture is not None else 0
        return taken * self.ranks + (self.rank + first) % self.ranks

    def _record_at(self, group: int, position: int, is_broken: Callable[[int], bool]) -> int:
        """Return the record at a position in the order of one stage or set, or the next one that is not broken."""
        records = self._groups[group]
        epoch, offset = divmod(position, len(records))
        order = self._order_of(group, epoch)
        following = (int(order[place % len(records)]) for place in itertools.count(offset))
        return next(record for record in following if not is_broken(record))

    def _order_of(self, group: int, epoch: int) -> Sequence[int] | NDArray[np.integer[Any]] | KeyedPermutation:
        if not self.shuffled:
            return self._groups[group]
        if group not in self._permutations or self._permutations[group][0] != epoch:
            if self._mixture is None:
                self._permutations.clear()  # an earlier stage does not come back
            self._permutations[group] = epoch, self._permute(group, epoch)
        return self._permutations[group][1]

    def _permute(self, group: int, epoch: int) -> NDArray[np.uint32] | KeyedPermutation:
        """Return the records of a stage or set in the order of an epoch. Few of them are shuffled as they always
        were, so that earlier runs can be resumed and repeated. Many would need too much memory for that."""
        records, random = self._groups[group], np.random.default_rng((self.seed, group, epoch))
        if len(records) > SHUFFLED:
            return KeyedPermutation(records, random)
        order = np.array(records, dtype=np.uint32)
        random.shuffle(order)
        return order


class RowStream:
    """Says which records the next optimizer step takes, and packs their examples.

    A step has `accumulation` micro-steps. Without a `buffer`, the examples of a micro-step are one micro-batch of
    `batch`, which the trainer may cut into rows. With it, every micro-step draws one row, and takes a new
    micro-batch unless enough examples wait: the tokens of two rows. Examples that are planned, but not packed yet,
    count with the mean length of the latest ones, and before there are any, with that of ground truth
    (`measure_truth`). A micro-batch that the buffer cannot hold stops the run. With a `quarantine`, other records
    take the places of those with broken images. `identity` has what must be the
    same after a resume, besides order and sizes."""

    def __init__(
        self,
        order: SampleOrder,
        batch: int,
        buffer: CarryBuffer[Example] | None,
        *,
        max_length: int,
        accumulation: int = 1,
        metrics: StepMetrics | None = None,
        identity: dict[str, Any] | None = None,
        measure_truth: Callable[[int], int] = _no_length,
        quarantine: Quarantine | None = None,
    ) -> None:
        self.order = order
        self._quarantine = quarantine
        self.taken = self.rows = 0
        self.buffer = buffer
        self.metrics = metrics or StepMetrics()
        # How many samples each micro-step takes that is planned, but not packed yet.
        self._planned: deque[int] = deque()
        self._recent_samples = self._recent_tokens = 0.0  # that were packed, the latest with the most weight
        self._measure_truth = measure_truth
        self._batch = batch
        self._max_length = max_length
        self.accumulation = accumulation
        self._identity = {
            "batch": batch,
            "accumulation": accumulation,
            "max_length": max_length,
            "packing": buffer is not None,
            **(identity or {}),
        }

    @property
    def epoch(self) -> float:
        """The samples that were taken, divided by all records. In a mixture, each set has epochs of its own."""
        return (self.order.begin + self.taken * self.order.ranks) / self.order.records

    @property
    def has_plans(self) -> bool:
        """True if records were taken whose examples are not packed yet."""
        return bool(self._planned)

    @property
    def next_step(self) -> int:
        """The optimizer step of the next micro-step."""
        return self.rows // self.accumulation

    def plan_step(self) -> StepPlan:
        """Return the records that the next optimizer step takes."""
        step = self.next_step
        return StepPlan(step, tuple(self.plan_micro_step() for _ in range(self.accumulation)))

    def plan_micro_step(self) -> tuple[int, ...]:
        """Return the records that the next micro-step takes: none, if enough examples wait."""
        enough = self.buffer is not None and self._has_enough(self.buffer)
        count = 0 if enough else self._batch
        indices = tuple(self.order.index(self.taken + k) for k in range(count))
        if self._quarantine is not None:
            self._quarantine.examine(indices)
            indices = tuple(self.order.index(self.taken + k, self._quarantine.is_broken) for k in range(count))
        self.rows += 1
        self.taken += count
        self._planned.append(count)
        return indices

    def next_records(self) -> list[int]:
        """Return the records that will be taken next, as many as two steps take at most."""
        return [self.order.index(self.taken + k) for k in range(2 * self._batch * self.accumulation)]

    def _has_enough(self, buffer: CarryBuffer[Example]) -> bool:
        """Return True if the tokens of two rows will probably wait when all planned micro-steps are packed, and if
        an example will be left in any case."""
        if len(buffer) + sum(self._planned) <= len(self._planned):
            return False
        tokens, mean = float(buffer.tokens), self._mean_length() if self._planned else 0.0
        for samples in self._planned:
            tokens = max(0.0, tokens + samples * mean - buffer.capacity)
        return tokens >= 2 * buffer.capacity

    def _mean_length(self) -> float:
        if not self._recent_samples:
            lengths = [self._measure_truth(self.order.index(k)) for k in range(self._batch)]
            self._recent_samples, self._recent_tokens = float(len(lengths)), float(sum(lengths))
        return self._recent_tokens / self._recent_samples

    def pack(self, examples: Sequence[Example]) -> tuple[Example, ...]:
        """Return the examples to train on in the next micro-step. `examples` are those of the records that it
        takes."""
        self._planned.popleft()
        if self.buffer is None:
            self._check_lengths(examples)
            return tuple(examples)
        for example in examples:
            self.buffer.add(example)
        if examples:
            self._recent_samples = RECENT * self._recent_samples + len(examples)
            self._recent_tokens = RECENT * self._recent_tokens + sum(map(len, examples))
        row = self.buffer.draw(leave=self._count_needed())
        self.metrics.add_row(row.report)
        return row.items

    def _count_needed(self) -> int:
        """Return how many examples must wait after this row, so that every planned micro-step has one."""
        needed, arriving = 0, 0
        for number, samples in enumerate(self._planned, start=1):
            arriving += samples
            needed = max(needed, number - arriving)
        return needed

    def save(self, folder: Path) -> None:
        rank = self.order.rank
        if self.buffer is not None:
            save_buffer(self.buffer, _buffer_file(folder, rank))
        state = {
            "taken": self.taken,
            "rows": self.rows,
            "planned": list(self._planned),
            "recent": [self._recent_samples, self._recent_tokens],
            "begin": self.order.begin,
            "done": self.order.done,
            "order": self.order.describe(),
            **self._identity,
        }
        write_whole(_state_file(folder, rank), json.dumps(state) + "\n")

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint. Raise DataError if it does not fit this run."""
        ranks = _read_state(folder, 0)["order"]["ranks"]
        if ranks != self.order.ranks:
            self._take_over(folder, ranks)
            return
        file = _state_file(folder, self.order.rank)
        state = _read_state(folder, self.order.rank)
        self._check(file, state, self.order.describe() | self._identity)
        self._restore_order(self.order, state)
        self.taken, self.rows = state["taken"], state["rows"]
        self._planned = deque(state["planned"])
        self._recent_samples, self._recent_tokens = state["recent"]
        if self.buffer is not None:
            self.buffer.restore(*read_buffer(_buffer_file(folder, self.order.rank)))

    def _take_over(self, folder: Path, ranks: int) -> None:
        """Continue from a checkpoint of another number of ranks. Examples that wait for a row are dealt to the
        ranks of now. Samples of steps that were only planned are taken again."""
        states = [_read_state(folder, rank) for rank in range(ranks)]
        sizes = ("batch", "accumulation", "rank", "ranks")
        facts = {
            name: value for name, value in (self.order.describe() | self._identity).items() if name not in sizes
        }
        self._check(_state_file(folder, 0), states[0], facts)
        before = states[0]["batch"] * states[0]["accumulation"] * ranks
        if before != (now := self._batch * self.accumulation * self.order.ranks):
            raise DataError(
                f"{folder}: a step of its {ranks} processes has {before} samples, and one of the "
                f"{self.order.ranks} processes of this run has {now}",
                "choose training.per_device_train_batch_size and gradient_accumulation_steps so that the product "
                f"of both and the number of processes is {before}",
            )
        planned = [state["planned"] for state in states]
        orders = [copy(self.order) for _ in states]
        for rank, (order, state) in enumerate(zip(orders, states, strict=True)):
            order.rank, order.ranks = rank, ranks
            self._restore_order(order, state)
        taken = [state["taken"] - sum(plan) for state, plan in zip(states, planned, strict=True)]
        self.order.continue_from(orders, taken)
        steps = (states[0]["rows"] - len(planned[0])) // states[0]["accumulation"]
        self.taken, self.rows, self._planned = 0, steps * self.accumulation, deque()
        recent = [state["recent"] for state in states]
        self._recent_samples, self._recent_tokens = map(sum, zip(*recent, strict=True))
        if self.buffer is not None:
            waiting = [pair for rank in range(ranks) for pair in read_buffer(_buffer_file(folder, rank))[0]]
            self.buffer.restore([(example, 0) for example, _ in waiting[self.order.rank :: self.order.ranks]], 0)

    @staticmethod
    def _restore_order(order: SampleOrder, state: dict[str, Any]) -> None:
        order.begin = state["begin"]
        order.leave_out(state["done"])

    @staticmethod
    def _check(file: Path, state: dict[str, Any], facts: dict[str, Any]) -> None:
        saved = state["order"] | state
        for name, value in facts.items():
            if saved.get(name) != value:
                raise DataError(
                    f"{file}: the checkpoint has {name} {saved.get(name)}, this run {value}",
                    "resume with the same data and settings, or start a new run from the checkpoint's weights "
                    "(model.path)",
                )

    def _check_lengths(self, examples: Sequence[Example]) -> None:
        for example in examples:
            if len(example) > self._max_length:
                raise PackingError(
                    f"{example.name}: {len(example)} tokens, and global_max_length is {self._max_length}",
                    "raise global_max_length, lower rollout_matching.max_new_tokens if the example comes from a "
                    "rollout, or remove the record from the data",
                )


def save_buffer(buffer: CarryBuffer[Example], path: Path) -> None:
    """Save the examples that wait. The streams of the first one are the arrays `0.ids`, `0.roles` and so on."""
    arrays: dict[str, NDArray[Any]] = {}
    others = []
    for k, (example, arrived) in enumerate(buffer.waiting):
        arrays |= {f"{k}.{name}": getattr(example.segment, name) for name in _STREAMS}
        source = {name: value for name, value in vars(example).items() if name not in ("segment", "id")}
        id = astuple(example.id) if example.id else None
        others.append((source, id, example.segment.prompt_length, arrived))
    metadata = {"format": str(FORMAT), "rows": str(buffer.rows), "examples": json.dumps(others)}
    save_file(arrays, path, metadata=metadata)


def read_buffer(path: Path) -> tuple[list[tuple[Example, int]], int]:
    """Return the examples that waited, each with the number of rows before it, and the number of all rows."""
    problem, errors = f"{path} does not hold a carry buffer of this version", (KeyError, TypeError, ValueError)
    with (
        explain((SafetensorError, *errors), problem, "resume from another checkpoint"),
        safe_open(path, framework="numpy") as file,
    ):
        metadata = file.metadata() or {}
        if (number := metadata.get("format")) != str(FORMAT):
            raise ValueError(f"it has format {number}, and this version reads {FORMAT}")
        waiting = []
        for k, (source, id, prompt_length, arrived) in enumerate(json.loads(metadata["examples"])):
            streams = {name: file.get_tensor(f"{k}.{name}") for name in _STREAMS}
            source |= {"size": tuple(source["size"]), "id": ExampleId(*id) if id else None}
            waiting.append((Example(Segment(**streams, prompt_length=prompt_length), **source), arrived))
        return waiting, int(metadata["rows"])


def _state_file(folder: Path, rank: int) -> Path:
    return folder / f"stream_{rank}.json"


def _buffer_file(folder: Path, rank: int) -> Path:
    return folder / f"carry_{rank}.safetensors"


def _read_state(folder: Path, rank: int) -> dict[str, Any]:
    file = _state_file(folder, rank)
    if not file.is_file():
        raise DataError(f"{file}: missing", "resume from a checkpoint that has the states of all its processes")
    state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return state
