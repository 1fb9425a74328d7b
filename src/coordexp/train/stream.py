"""The rows of one rank, one after the other, without an end: order, encoding, packing, and where it all stands.

The order of samples is a pure function of seed and epoch. What is saved is how many samples were taken, how many
rows were made and what waits in the carry buffer, so a resumed stream gives the very rows that the interrupted one
would have given. Nothing is read ahead.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coordexp.files import write_whole
from coordexp.pack import CarryBuffer, Example, PackingError
from coordexp.pack.state import load_buffer, save_buffer
from coordexp.train.checkpoints import ANNOUNCED
from coordexp.train.counters import Ledger
from coordexp.train.encode import Encode, Moment


@dataclass(frozen=True)
class Stage:
    """For so many samples, over all ranks, only these records are taken."""

    samples: int
    records: tuple[int, ...]


class Order:
    """Which record a rank takes next: a pure function of how many it has taken. The ranks take turns."""

    def __init__(
        self, records: int, rank: int, ranks: int, *, seed: int, shuffled: bool, stages: Sequence[Stage] = ()
    ) -> None:
        self.records, self.rank, self.ranks, self.seed, self.shuffled = records, rank, ranks, seed, shuffled
        self._stages = [(stage.samples, np.array(stage.records)) for stage in stages]
        self._permuted: tuple[tuple[int, int], np.ndarray] | None = None

    def index(self, taken: int) -> int:
        position = taken * self.ranks + self.rank
        for number, (samples, records) in enumerate(self._stages):
            if position < samples:
                return self._at(number, records, position)
            position -= samples
        return self._at(len(self._stages), np.arange(self.records), position)

    def described(self) -> dict[str, Any]:
        """What must be the same after a resume."""
        stages = [[samples, len(records)] for samples, records in self._stages]
        own = {name: getattr(self, name) for name in ("records", "rank", "ranks", "seed", "shuffled")}
        return own | {"stages": stages}

    def _at(self, stage: int, records: np.ndarray, position: int) -> int:
        epoch, at = divmod(position, len(records))
        if not self.shuffled:
            return int(records[at])
        if self._permuted is None or self._permuted[0] != (stage, epoch):
            chooser = np.random.default_rng((self.seed, stage, epoch))
            self._permuted = (stage, epoch), chooser.permutation(records)
        return int(self._permuted[1][at])


class RowStream:
    """Without a `buffer`, the stream yields whole micro-batches, which the trainer may cut into rows. With it, one
    micro-batch of samples joins what waits, unless that is two rows already, and the next row is drawn. A
    micro-batch that the buffer cannot hold stops the run. `accumulation` rows make an optimizer step. `about` is
    what must be the same after a resume, besides order and sizes."""

    def __init__(
        self,
        order: Order,
        encode: Encode,
        batch: int,
        buffer: CarryBuffer[Example] | None,
        *,
        max_length: int,
        accumulation: int = 1,
        ledger: Ledger | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        self.order = order
        self.taken = self.rows = 0
        self.buffer = buffer
        self.ledger = ledger or Ledger()
        self._encode = encode
        self._batch = batch
        self._max_length = max_length
        self._accumulation = accumulation
        self._about = {
            "batch": batch,
            "accumulation": accumulation,
            "max_length": max_length,
            "packing": buffer is not None,
            **(about or {}),
        }

    @property
    def epoch(self) -> float:
        return self.taken * self.order.ranks / self.order.records

    def __iter__(self) -> Iterator[tuple[Example, ...]]:
        while True:
            yield self._row()

    def save(self, folder: Path) -> None:
        rank = self.order.rank
        if self.buffer is not None:
            save_buffer(self.buffer, folder / f"carry_{rank}.safetensors")
        state = {"taken": self.taken, "rows": self.rows, "order": self.order.described(), **self._about}
        write_whole(folder / f"stream_{rank}.json", json.dumps(state | {ANNOUNCED: True}) + "\n")

    def load(self, folder: Path) -> None:
        file = folder / f"stream_{self.order.rank}.json"
        if not file.is_file():
            raise ValueError(f"{file}: missing\n  resume with as many processes as the checkpoint was written by")
        state = json.loads(file.read_text())
        saved = state["order"] | state
        for what, value in (self.order.described() | self._about).items():
            if saved.get(what) != value:
                raise ValueError(
                    f"{file}: the checkpoint has {what} {saved.get(what)}, this run {value}\n"
                    "  resume with the same data, settings and number of processes, or start a new run from "
                    "the checkpoint's weights (model.path)"
                )
        self.taken, self.rows = state["taken"], state["rows"]
        if self.buffer is not None:
            load_buffer(self.buffer, folder / f"carry_{self.order.rank}.safetensors")

    def _row(self) -> tuple[Example, ...]:
        moment = Moment(*divmod(self.rows, self._accumulation))
        self.rows += 1
        if self.buffer is None:
            return tuple(self._fitting(each) for each in self._next(self._batch, moment))
        enough = self.buffer.tokens >= 2 * self.buffer.capacity
        for example in self._next(0 if enough else self._batch, moment):
            self.buffer.add(example)
        row = self.buffer.draw()
        self.ledger.packed(row.report)
        return row.items

    def _fitting(self, example: Example) -> Example:
        if len(example) > self._max_length:
            raise PackingError(
                f"{example.image}: {len(example)} tokens, and global_max_length is {self._max_length}\n"
                "  raise global_max_length, lower rollout_matching.max_new_tokens if it is an answer, or take the "
                "record out of the data"
            )
        return example

    def _next(self, count: int, moment: Moment) -> list[Example]:
        """Also asked for none: a sharded model needs every rank while others answer."""
        indices = [self.order.index(self.taken + k) for k in range(count)]
        self.taken += count
        return self._encode(indices, moment)
