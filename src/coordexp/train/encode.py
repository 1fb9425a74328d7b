"""Turn training samples into examples: channel A from the ground truth, channel B from corrected rollouts.

Channel A is channel B with an empty rollout. Which channel a step takes depends only on the number of the step,
so it is the same on every rank and after a resume.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from coordexp.config import RolloutMatching
from coordexp.config.rollout import NoiseAnswers
from coordexp.config.sections import Channel
from coordexp.correction import Choice, Correction, FieldOrder, choose_answer, correct, make_noisy_answer
from coordexp.data import Records, TrueObject
from coordexp.errors import explain
from coordexp.pack import Example, ExampleId
from coordexp.rollout.backend import (
    Decode,
    ImageRef,
    Request,
    Rollout,
    check_prompt,
    check_version,
    request_seed,
)
from coordexp.rollout.prompt import PromptBuilder
from coordexp.train.metrics import StepMetrics, count_rollout
from coordexp.vocab import VocabularyTable


@dataclass(frozen=True)
class StepIndex:
    """An optimizer step and one of its micro-steps, both from 0. Examples, dumps and weight versions are numbered
    in this way. The log, traces and checkpoints count from 1, so step 0 here is step 1 there."""

    step: int
    micro: int


@dataclass(frozen=True)
class StepPlan:
    """The records that an optimizer step takes, by micro-step."""

    step: int
    records: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TrainingSample:
    """A record in the form that training needs. `index` is its number in the data, from 0."""

    index: int
    image: ImageRef
    prompt_ids: tuple[int, ...]
    truth: tuple[TrueObject, ...]


@dataclass(frozen=True)
class TrainingSet:
    """The training records, and how an answer to one of them is corrected."""

    records: Records
    prompts: PromptBuilder
    table: VocabularyTable
    order: FieldOrder
    settings: RolloutMatching

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> TrainingSample:
        file, number = self.records.locate(index)
        record = file[number]
        problem = f"{file}, record {number + 1} ({record.image})"
        with explain(ValueError, problem, f"run `coordexp data doctor {file}`"):
            truth = record.true_objects()
        image = ImageRef.of(file, record)
        return TrainingSample(index, image, tuple(self.prompts.ids(*image.size, image.path)), tuple(truth))

    def measure_truth(self, index: int) -> int:
        """Return how many tokens the example of a record has if it is made from the ground truth."""
        return len(self.correct(self[index], ()).segment)

    def make_noisy_rollout(self, sample: TrainingSample, noise: NoiseAnswers, seed: int, version: int) -> Rollout:
        """Return a rollout that no model wrote: the labels with random mistakes."""
        ids = make_noisy_answer(sample.truth, noise, seed, table=self.table, order=self.order)
        return Rollout.of(self.table, sample.prompt_ids, ids, (), "stop", version)

    def choose(self, sample: TrainingSample, answers: Sequence[Sequence[int]]) -> Choice:
        return choose_answer(answers, sample.truth, table=self.table, settings=self.settings)

    def correct(
        self, sample: TrainingSample, answer: Sequence[int], agreed: Sequence[TrueObject] | None = None
    ) -> Correction:
        return correct(
            sample.prompt_ids,
            answer,
            sample.truth,
            table=self.table,
            order=self.order,
            settings=self.settings,
            agreed=agreed,
        )


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one micro-step. On channel B, there are `rollouts_per_sample` requests for each; the requests
    of a sample follow each other."""

    at: StepIndex
    samples: tuple[TrainingSample, ...]
    requests: tuple[Request, ...] = ()


@dataclass(frozen=True)
class AnsweredSample:
    """A training sample with the model's rollouts for it, and the requests for them."""

    sample: TrainingSample
    requests: tuple[Request, ...]
    rollouts: tuple[Rollout, ...]


# Called for every corrected rollout, with the id of its example, its sample with all rollouts, the choice among
# them, and the correction.
Watch = Callable[[ExampleId, AnsweredSample, Choice, Correction], None]


@dataclass(frozen=True)
class Encoder:
    """Makes the requests and the examples of one rank. `b_ratio` is the share of steps that train on rollouts: 0
    for Stage 1, 1 for Stage 2, in between for both channels in turn. `seed` is the seed of the run."""

    training_set: TrainingSet
    rollout_matching_cfg: RolloutMatching
    seed: int
    rank: int
    metrics: StepMetrics
    b_ratio: Fraction = Fraction(1)
    watch: Watch | None = None
    max_staleness: int = 0

    def takes_rollouts(self, step: int) -> bool:
        return takes_rollouts(step, self.b_ratio)

    @property
    def uses_noise(self) -> bool:
        """True if labels with random mistakes stand for rollouts, and no model is asked."""
        return self.rollout_matching_cfg.noise.enabled

    def prepare(self, plan: StepPlan) -> list[MicroBatch]:
        """Read the samples of a step and, on channel B, make the requests for their rollouts."""
        return [
            self.prepare_micro_step(StepIndex(plan.step, micro), records)
            for micro, records in enumerate(plan.records)
        ]

    def prepare_micro_step(self, at: StepIndex, records: Sequence[int]) -> MicroBatch:
        samples = tuple(self.training_set[index] for index in records)
        if not self.takes_rollouts(at.step):
            return MicroBatch(at, samples)
        decode = Decode.of(self.rollout_matching_cfg)
        # Seeds are numbered by rounds, so that the first request of a sample has the same seed with one rollout
        # per sample and with several.
        return MicroBatch(
            at,
            samples,
            tuple(
                Request(
                    sample.image,
                    decode,
                    request_seed(self.seed, at.step, at.micro, self.rank, round * len(samples) + k),
                )
                for k, sample in enumerate(samples)
                for round in range(self.rollout_matching_cfg.rollouts_per_sample)
            ),
        )

    def encode(self, batch: MicroBatch, rollouts: Sequence[Rollout]) -> list[Example]:
        """Return an example per sample: of its rollouts on channel B, of the ground truth on channel A."""
        if not self.takes_rollouts(batch.at.step):
            return self.encode_ground_truth(batch)
        return self.correct_rollouts(batch, rollouts)

    def encode_ground_truth(self, batch: MicroBatch) -> list[Example]:
        """Channel A: return an example per sample, as if the model had answered nothing and missed every
        object."""
        return [
            _make_example(self._id(batch.at, k), sample, self.training_set.correct(sample, ()), "A")
            for k, sample in enumerate(batch.samples)
        ]

    def make_noisy_rollouts(self, batches: Sequence[MicroBatch]) -> list[Rollout]:
        """Return a rollout that no model wrote for each sample, which has one request."""
        noise = self.rollout_matching_cfg.noise
        return [
            self.training_set.make_noisy_rollout(sample, noise, request.seed, batch.at.step)
            for batch in batches
            for sample, request in zip(batch.samples, batch.requests, strict=True)
        ]

    def correct_rollouts(self, batch: MicroBatch, rollouts: Sequence[Rollout]) -> list[Example]:
        """Channel B: return an example per sample: the rollout that is chosen, corrected."""
        per_sample = self.rollout_matching_cfg.rollouts_per_sample
        examples = []
        with self.metrics.measure("correct"):
            for k, sample in enumerate(batch.samples):
                own = slice(k * per_sample, (k + 1) * per_sample)
                answered = AnsweredSample(sample, tuple(batch.requests[own]), tuple(rollouts[own]))
                examples.append(self._correct_rollout(batch.at, k, answered))
        return examples

    def _correct_rollout(self, at: StepIndex, k: int, answered: AnsweredSample) -> Example:
        sample, rollouts = answered.sample, answered.rollouts
        for rollout in rollouts:
            check_prompt(sample.image.path, rollout.prompt_ids, sample.prompt_ids)
            check_version(rollout, at.step, self.max_staleness)
        choice = self.training_set.choose(sample, [rollout.ids for rollout in rollouts])
        correction = self.training_set.correct(sample, rollouts[choice.index].ids, choice.agreed)
        mode = answered.requests[choice.index].decode.mode
        self.metrics.add(count_rollout(rollouts, choice, mode, correction, sample.truth, at.step))
        id = self._id(at, k)
        if self.watch is not None:
            self.watch(id, answered, choice, correction)
        return _make_example(id, sample, correction, "B")

    def _id(self, at: StepIndex, k: int) -> ExampleId:
        return ExampleId(at.step, at.micro, self.rank, k)


def _make_example(id: ExampleId, sample: TrainingSample, correction: Correction, channel: Channel) -> Example:
    return Example(correction.segment, sample.image.path, sample.image.size, channel, id)


def takes_rollouts(step: int, b_ratio: Fraction) -> bool:
    """Return True if the step trains on rollouts. Of the first n steps, b_ratio * n do, rounded down."""
    return int((step + 1) * b_ratio) > int(step * b_ratio)
