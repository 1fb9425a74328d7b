"""From records to examples: channel A is the ground truth, channel B the model's own answers, corrected.

Both are the same road; A is B with an empty answer. Which one a step takes is a function of its number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from coordexp.config import RolloutMatching
from coordexp.config.pipeline import Channel
from coordexp.correction import Correction, FieldOrder, correct
from coordexp.data import RecordError, RecordFile, TrueObject
from coordexp.pack import Example
from coordexp.rollout.backend import Decode, Picture, Request, Rollout, RolloutBackend, Weights
from coordexp.rollout.prompt import PromptBuilder, check_prompt
from coordexp.rollout.seeds import request_seed
from coordexp.train.counters import Ledger, counted
from coordexp.vocab import VocabularyTable


@dataclass(frozen=True)
class Moment:
    """An optimizer step and one of its micro-steps, from 0."""

    step: int
    micro: int


Encode = Callable[[Sequence[int], Moment], list[Example]]


@dataclass(frozen=True)
class Case:
    """A record as training needs it."""

    index: int
    picture: Picture
    prompt_ids: tuple[int, ...]
    truth: tuple[TrueObject, ...]


@dataclass(frozen=True)
class Casebook:
    """The training records, and how an answer to one of them is corrected."""

    records: RecordFile
    prompts: PromptBuilder
    table: VocabularyTable
    order: FieldOrder
    settings: RolloutMatching

    def __getitem__(self, index: int) -> Case:
        record = self.records[index]
        try:
            truth = record.sample().objects
        except ValueError as error:
            raise RecordError(
                f"{self.records.path}, record {index + 1} ({record.image}): {error}\n"
                f"  run `coordexp data doctor {self.records.path}`"
            ) from error
        picture = Picture.of(self.records, record)
        return Case(index, picture, tuple(self.prompts.ids(*picture.size, picture.path)), tuple(truth))

    def correct(self, case: Case, answer: Sequence[int]) -> Correction:
        return correct(
            case.prompt_ids, answer, case.truth, table=self.table, order=self.order, settings=self.settings
        )


def example(case: Case, correction: Correction, channel: Channel, dumped: str = "") -> Example:
    return Example(correction.segment, case.picture.path, case.picture.size, channel, dumped)


@dataclass(frozen=True)
class GroundTruth:
    """Channel A: every true object was missed by an answer that said nothing."""

    cases: Casebook

    def __call__(self, indices: Sequence[int], moment: Moment) -> list[Example]:
        cases = [self.cases[index] for index in indices]
        return [example(case, self.cases.correct(case, ()), "A") for case in cases]


# Says where it has written the example, or nothing.
Watch = Callable[[Moment, Case, Request, Rollout, Correction], str]


@dataclass(frozen=True)
class CorrectedRollouts:
    """Channel B: let the model answer, read the answer strictly, match it, append what was missed. `watch` sees
    every example whole."""

    cases: Casebook
    backend: RolloutBackend
    weights: Weights
    rollout_matching_cfg: RolloutMatching
    seed: int
    rank: int
    ledger: Ledger
    watch: Watch = lambda *_: ""

    def __call__(self, indices: Sequence[int], moment: Moment) -> list[Example]:
        decode = Decode.of(self.rollout_matching_cfg)
        cases = [self.cases[index] for index in indices]
        requests = [
            Request(case.picture, decode, request_seed(self.seed, moment.step, moment.micro, self.rank, k))
            for k, case in enumerate(cases)
        ]
        if moment.micro == 0:
            with self.ledger.timed("sync"):
                self.backend.sync(self.weights, version=moment.step)
        with self.ledger.timed("rollout"):
            rollouts = self.backend.generate(requests)
        examples = []
        with self.ledger.timed("correct"):
            for case, request, rollout in zip(cases, requests, rollouts, strict=True):
                check_prompt(case.picture.path, rollout.prompt_ids, case.prompt_ids)
                _check_version(rollout, moment.step)
                correction = self.cases.correct(case, rollout.ids)
                self.ledger.add(counted(rollout, decode.mode, correction, case.truth))
                dumped = self.watch(moment, case, request, rollout, correction)
                examples.append(example(case, correction, "B", dumped))
        return examples


def _check_version(rollout: Rollout, step: int) -> None:
    if rollout.version != step:
        raise RuntimeError(
            f"a rollout was made by weights of version {rollout.version}, and this step trains version {step}: "
            "the engine was not given the weights it should have"
        )


@dataclass(frozen=True)
class Alternate:
    """A or B, step by step: of the first n steps, b_ratio * n rounded down are B. The same on every rank and after
    a resume, since it depends on the step's number alone."""

    ground_truth: Encode
    rollouts: Encode
    b_ratio: Fraction

    def __call__(self, indices: Sequence[int], moment: Moment) -> list[Example]:
        return (self.rollouts if takes_rollouts(moment.step, self.b_ratio) else self.ground_truth)(indices, moment)


def takes_rollouts(step: int, b_ratio: Fraction) -> bool:
    return int((step + 1) * b_ratio) > int(step * b_ratio)
