"""Writes whole examples at chosen steps, for people, for `coordexp replay` and for the inspector.

Rank 0 alone, a bounded number a step. A disk that is full costs the dump and not the run: that is said, once.
"""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from coordexp.rollout.backend import Request, Rollout
from coordexp.target import Correction
from coordexp.target.dump import Place, to_line
from coordexp.train.encode import Case, Casebook, Moment

logger = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"


@dataclass
class Dumps:
    """`dumps/step-000100.jsonl`, and the tokenizer beside it, so that the folder can be read without the model. Of
    every `every` steps the first one with rollouts: with two channels, a certain step may have none."""

    folder: Path
    model: Path
    cases: Casebook
    every: int
    samples: int
    _step: int = -1
    _written: int = 0
    _failed: bool = False

    def __call__(
        self, moment: Moment, case: Case, request: Request, rollout: Rollout, correction: Correction
    ) -> None:
        if moment.step // self.every != self._step // self.every:
            self._step, self._written = moment.step, 0
        if moment.step == self._step and self._written < self.samples:
            self._write(moment, case, request, rollout, correction)
            self._written += 1

    def _write(
        self, moment: Moment, case: Case, request: Request, rollout: Rollout, correction: Correction
    ) -> None:
        cases = self.cases
        line = to_line(
            Place(moment.step, moment.micro, 0, case.index),
            request,
            rollout,
            case.truth,
            correction,
            table=cases.table,
            order=cases.order,
            settings=cases.settings,
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / TOKENIZER).is_file():
                partial = self.folder / f"{TOKENIZER}.partial"
                shutil.copyfile(self.model / TOKENIZER, partial)
                partial.rename(self.folder / TOKENIZER)
            # A resumed run makes the steps after its checkpoint again.
            with (self.folder / f"step-{moment.step:06d}.jsonl").open("a" if self._written else "w") as file:
                file.write(line + "\n")
        except OSError as error:
            if not self._failed:
                logger.warning("dumps are not written: %s; training goes on", error)
            self._failed = True
