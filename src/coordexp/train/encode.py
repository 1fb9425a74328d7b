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
    RolloutBackend,
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
    """Makes the examples of one rank. `b_ratio` is the share of steps that train on rollouts: 0 for Stage 1, 1 for
    Stage 2, in between for both channels in turn. `seed` is the seed of the run."""

    training_set: TrainingSet
    backend: RolloutBackend
    rollout_matching_cfg: RolloutMatching
    seed: int
    rank: int
    metrics: StepMetrics
    b_ratio: Fraction = Fraction(1)
    watch: Watch | None = None

    def takes_rollouts(self, step: int) -> bool:
        return takes_rollouts(step, self.b_ratio)

    def load_samples(self, indices: Sequence[int]) -> list[TrainingSample]:
        return [self.training_set[index] for index in indices]

    def encode_ground_truth(self, samples: Sequence[TrainingSample], at: StepIndex) -> list[Example]:
        """Channel A: return an example per sample, as if the model had answered nothing and missed every
        object."""
        return [
            _make_example(self._id(at, k), sample, self.training_set.correct(sample, ()), "A")
            for k, sample in enumerate(samples)
        ]

    def collect_rollouts(self, samples: Sequence[TrainingSample], at: StepIndex) -> list[AnsweredSample]:
        """Channel B: ask the backend for the rollouts of all samples, in one call. It is called with no samples
        too, because generation may contain collectives: of a sharded model, or of an engine that several ranks
        share."""
        settings = self.rollout_matching_cfg
        decode, per_sample = Decode.of(settings), settings.rollouts_per_sample
        # The requests of an image follow each other, so that one server or prefix cache gets them. Their seeds are
        # numbered by rounds, so that the first one has the same seed with one rollout per sample and with several.
        requests = [
            Request(
                sample.image,
                decode,
                request_seed(self.seed, at.step, at.micro, self.rank, round * len(samples) + k),
            )
            for k, sample in enumerate(samples)
            for round in range(per_sample)
        ]
        with self.metrics.measure("rollout"):
            if settings.noise.enabled:
                rollouts = [
                    self.training_set.make_noisy_rollout(sample, settings.noise, request.seed, at.step)
                    for sample, request in zip(samples, requests, strict=True)
                ]
            else:
                rollouts = self.backend.generate(requests)
        answers = list(zip(requests, rollouts, strict=True))
        return [
            AnsweredSample(sample, *zip(*answers[k * per_sample : (k + 1) * per_sample], strict=True))
            for k, sample in enumerate(samples)
        ]

    def correct_rollouts(self, answered: Sequence[AnsweredSample], at: StepIndex) -> list[Example]:
        """Channel B: return an example per sample: the rollout that is chosen, corrected."""
        with self.metrics.measure("correct"):
            return [self._correct_rollout(at, k, answer) for k, answer in enumerate(answered)]

    def _correct_rollout(self, at: StepIndex, k: int, answered: AnsweredSample) -> Example:
        sample, rollouts = answered.sample, answered.rollouts
        for rollout in rollouts:
            check_prompt(sample.image.path, rollout.prompt_ids, sample.prompt_ids)
            check_version(rollout, at.step)
        choice = self.training_set.choose(sample, [rollout.ids for rollout in rollouts])
        correction = self.training_set.correct(sample, rollouts[choice.index].ids, choice.agreed)
        mode = answered.requests[choice.index].decode.mode
        self.metrics.add(count_rollout(rollouts, choice, mode, correction, sample.truth))
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
