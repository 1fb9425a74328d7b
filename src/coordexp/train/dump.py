"""Writes whole examples at chosen steps, for people, for `coordexp replay` and for the inspector.

Rank 0 alone, a bounded number a step. The pictures of the first dump are followed: whenever one of them is
answered again, that is written too, so that the same picture can be seen at several steps.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from coordexp.correction import Correction
from coordexp.dump_files import FOLLOWED, step_file, step_files
from coordexp.dumps import Place, to_line
from coordexp.rollout.backend import Request, Rollout
from coordexp.train.dump_folder import DumpFolder
from coordexp.train.encode import Case, Casebook, Moment

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Following:
    """The records that were dumped at `step`, the first of a run with a dump."""

    step: int
    records: set[int]


@dataclass
class Dumps:
    """`step-000100.jsonl`, of every `every` steps the first one with rollouts: with two channels, a certain step
    may have none; at most `samples` of them. And `followed/step-000123.jsonl`, of the followed records."""

    folder: DumpFolder
    cases: Casebook
    every: int
    samples: int
    _step: int = -1
    _following: Following | None = None

    def __call__(
        self, moment: Moment, case: Case, request: Request, rollout: Rollout, correction: Correction
    ) -> str:
        self._following = self._following or self._of_earlier_run(moment.step)
        file = self._file(moment.step, case.index)
        if file is None:
            return ""
        line = self._line(moment, case, request, rollout, correction)
        dumped = self.folder.add(file, line)
        if dumped:
            self._following = self._following or Following(moment.step, set())
            if self._following.step == moment.step:
                self._following.records.add(case.index)
        return dumped

    def _file(self, step: int, record: int) -> str | None:
        """Where an answer to this record goes, if anywhere."""
        if step // self.every != self._step // self.every:
            self._step = step
        name = step_file(step)
        if step == self._step and self.folder.lines(name) < self.samples:
            return name
        first = self._following
        return f"{FOLLOWED}/{name}" if first and first.step < step and record in first.records else None

    def _line(self, moment: Moment, case: Case, request: Request, rollout: Rollout, correction: Correction) -> str:
        cases = self.cases
        return to_line(
            Place(moment.step, moment.micro, 0, case.index),
            request,
            rollout,
            case.truth,
            correction,
            order=cases.order,
            settings=cases.settings,
        )

    def _of_earlier_run(self, step: int) -> Following | None:
        """What a run that is resumed before `step` has followed so far."""
        first, file = next(iter(step_files(self.folder.path).items()), (step, None))
        return Following(first, set(_records(file)[: self.samples])) if file and first < step else None


def _records(file: Path) -> list[int]:
    try:
        return [int(json.loads(line)["place"]["record"]) for line in file.read_bytes().splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%r): no picture is followed", file, error)
        return []
