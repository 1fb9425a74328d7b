"""Turn training samples into examples: channel A from the ground truth, channel B from corrected rollouts.

Channel A is channel B with an empty rollout. Which channel a step takes depends only on the number of the step,
so it is the same on every rank and after a resume. A chat record has its answer, so it needs no rollout: it is on
channel A in every step.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from coordexp.answers.correct import Choice, Correction, choose_answer, correct, make_noisy_answer
from coordexp.answers.formats import AnswerFormat
from coordexp.answers.segment import FieldOrder, Segment, build_chat_segment
from coordexp.answers.table import VocabularyTable
from coordexp.config import RolloutMatching
from coordexp.config.sections import Channel
from coordexp.config.settings import Custom
from coordexp.data import (
    ChatRecord,
    Questions,
    Record,
    RecordFile,
    Records,
    RecordSet,
    TrueObject,
    draw_request,
    order_objects,
)
from coordexp.errors import DataError, explain
from coordexp.objective.carry import Example, ExampleId
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
from coordexp.train.quarantine import Quarantine

SEARCHED = 1000  # records of a data set among which images are looked for


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
    """A record in the form that training needs. `index` is its number in the data, from 0. `question` is that of a
    request of its own, or one that was drawn for it. `complete` are the classes of which the record says that
    every object is labelled."""

    index: int
    image: ImageRef
    prompt_ids: tuple[int, ...]
    truth: tuple[TrueObject, ...]
    question: str | None = None
    data_set: int = 0
    complete: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatSample:
    """A chat record in the form that training needs: the segment of its prompt and its answer."""

    index: int
    image: ImageRef | None
    segment: Segment
    data_set: int = 0


@dataclass(frozen=True)
class TrainingSet:
    """The training records, what is asked about them, how answers are written, and how an answer to one of them is
    corrected. `trains_chat` is True if the objective of the run trains on chat records."""

    records: Records
    prompts: PromptBuilder
    answers: AnswerFormat
    settings: RolloutMatching
    custom: Custom = field(default_factory=Custom)
    trains_chat: bool = False

    @property
    def table(self) -> VocabularyTable:
        return self.answers.table

    def __len__(self) -> int:
        return len(self.records)

    @property
    def order(self) -> FieldOrder:
        return self.custom.object_field_order

    def read(self, index: int, step: int) -> TrainingSample | ChatSample:
        """Return a record as an optimizer step takes it, with the request and the order of objects that are drawn
        for this step."""
        file, number = self.records.locate(index)
        record, data_set = file.read(number), self._find_set(index)
        if isinstance(record, ChatRecord):
            return self._read_chat(record, file, f"{file}, record {number + 1}", index, data_set)
        record = self._draw(record, index, step)
        with explain(ValueError, self._name_record(index, record.image), f"run `coordexp data doctor {file}`"):
            truth = record.true_objects()
        image, question = ImageRef.of(file, record), self._questions[data_set].ask(record)
        prompt_ids = self.prompts.ids(*image.size, image.path, question)
        own = question if question != self._questions_of_run.of_run else None
        complete = record.exhaustive or ()
        return TrainingSample(index, image, tuple(prompt_ids), tuple(truth), own, data_set, complete)

    def _read_chat(
        self, record: ChatRecord, file: RecordFile, place: str, index: int, data_set: int
    ) -> ChatSample:
        if not self.trains_chat:
            raise DataError(
                f"{place}: it has a question and an answer, which no loss of this run trains on",
                "declare the module chat_ce in the objective (docs/training.md), or remove such records",
            )
        image = None if record.image is None else ImageRef.of(file, record)
        with explain(ValueError, place, f"run `coordexp data doctor {file}`"):
            if image is None:
                prompt_ids = self.prompts.text_ids(record.question)
            else:
                prompt_ids = self.prompts.ids(*image.size, image.path, record.question)
            segment = build_chat_segment(prompt_ids, record.answer, self.table)
        return ChatSample(index, image, segment, data_set)

    def _draw(self, record: Record, index: int, step: int) -> Record:
        custom = self.custom
        draw = random.Random(f"{custom.negatives.seed} {step} {index}")  # noqa: S311  (not a secret)
        data: Records = self.records
        if len(custom.train_data) > 1:
            data = data.parts[self._find_set(index)]  # the sets of a mixture may have different classes

        def read_other(draw: random.Random) -> Record:
            other = data.read(draw.randrange(len(data)))
            return record if isinstance(other, ChatRecord) else other  # its own classes are not absent

        record = draw_request(record, draw, custom.class_requests, custom.negatives, read_other)
        return order_objects(record, custom.object_order, draw)

    def _find_set(self, index: int) -> int:
        """Return the number of the data set of a record, from 0."""
        if len(self.custom.train_data) < 2:
            return 0
        assert isinstance(self.records, RecordSet)
        return self.records.find_part(index)[0]

    @cached_property
    def _questions_of_run(self) -> Questions:
        return Questions.of(self.custom)

    @cached_property
    def _questions(self) -> tuple[Questions, ...]:
        """The texts of each data set."""
        sets = [Questions.of(self.custom, data) for data in self.custom.train_data]
        return tuple(sets) or (self._questions_of_run,)

    def measure_truth(self, index: int) -> int:
        """Return how many tokens the example of a record has if it is made from the ground truth."""
        return len(self.build_truth(self.read(index, 0)))

    def build_truth(self, sample: TrainingSample | ChatSample) -> Segment:
        """Return the training sequence of a sample without a rollout. Raise DataError if the format of answers
        cannot express it."""
        if isinstance(sample, ChatSample):
            return sample.segment
        fix = "set custom.answer_format: coord_tokens, or train on records with bbox_2d in place of poly"
        with explain(ValueError, self._name_record(sample.index, sample.image.path), fix):
            return self.answers.write(sample.prompt_ids, sample.truth)

    def _name_record(self, index: int, image: str) -> str:
        file, number = self.records.locate(index)
        return f"{file}, record {number + 1} ({image})"

    def find_images(self, most: int, quarantine: Quarantine | None = None) -> list[ImageRef]:
        """Return images of up to `most` records with objects, without broken ones. The first records of every data
        set are looked at."""
        images: list[ImageRef] = []
        begin = 0
        for part in self.records.parts:
            for index in range(min(SEARCHED, len(part))):
                if len(images) == most:
                    return images
                file, number = part.locate(index)
                is_broken = quarantine is not None and quarantine.is_broken(begin + index)
                if isinstance(record := file.read(number), Record) and not is_broken:
                    images.append(ImageRef.of(file, record))
            begin += len(part)
        return images


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one micro-step. On channel B, there are `rollouts_per_sample` requests for each, except for
    those of chat records; the requests of a sample follow each other."""

    at: StepIndex
    samples: tuple[TrainingSample | ChatSample, ...]
    requests: tuple[Request, ...] = ()

    @property
    def asked(self) -> list[TrainingSample]:
        """The samples that a model is asked about on channel B."""
        return [sample for sample in self.samples if isinstance(sample, TrainingSample)]


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
        return self.training_set.settings.noise.enabled

    def prepare(self, plan: StepPlan) -> list[MicroBatch]:
        """Read the samples of a step and, on channel B, make the requests for their rollouts."""
        return [
            self.prepare_micro_step(StepIndex(plan.step, micro), records)
            for micro, records in enumerate(plan.records)
        ]

    def prepare_micro_step(self, at: StepIndex, records: Sequence[int]) -> MicroBatch:
        samples = tuple(self.training_set.read(index, at.step) for index in records)
        if not self.takes_rollouts(at.step):
            return MicroBatch(at, samples)
        decode = Decode.of(self.training_set.settings)
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
                    sample.question,
                )
                for k, sample in enumerate(samples)
                if isinstance(sample, TrainingSample)
                for round in range(self.training_set.settings.rollouts_per_sample)
            ),
        )

    def encode(self, batch: MicroBatch, rollouts: Sequence[Rollout]) -> list[Example]:
        """Return an example per sample: of its rollouts on channel B; on channel A of the ground truth, as if the
        model had answered nothing and missed every object. The example of a chat record has its own answer on
        both."""
        if self.takes_rollouts(batch.at.step):
            return self._correct_rollouts(batch, rollouts)
        return [self._encode_truth(batch.at, k, sample) for k, sample in enumerate(batch.samples)]

    def _encode_truth(self, at: StepIndex, k: int, sample: TrainingSample | ChatSample) -> Example:
        return _make_example(self._id(at, k), sample, self.training_set.build_truth(sample), "A")

    def make_noisy_rollouts(self, batches: Sequence[MicroBatch]) -> list[Rollout]:
        """Return a rollout that no model wrote for each sample, which has one request: the labels with random
        mistakes."""
        table, order, noise = self.training_set.table, self.training_set.order, self.training_set.settings.noise
        rollouts = []
        for batch in batches:
            for sample, request in zip(batch.asked, batch.requests, strict=True):
                ids = make_noisy_answer(sample.truth, noise, request.seed, table=table, order=order)
                rollouts.append(Rollout.of(table, sample.prompt_ids, ids, (), "stop", batch.at.step))
        return rollouts

    def _correct_rollouts(self, batch: MicroBatch, rollouts: Sequence[Rollout]) -> list[Example]:
        """Channel B: return an example per sample: the rollout that is chosen, corrected."""
        per_sample = self.training_set.settings.rollouts_per_sample
        examples, begin = list[Example](), 0
        with self.metrics.measure("correct"):
            for k, sample in enumerate(batch.samples):
                if isinstance(sample, ChatSample):
                    examples.append(self._encode_truth(batch.at, k, sample))
                    continue
                own = slice(begin, begin + per_sample)
                answered = AnsweredSample(sample, tuple(batch.requests[own]), tuple(rollouts[own]))
                examples.append(self._correct_rollout(batch.at, k, answered))
                begin += per_sample
        return examples

    def _correct_rollout(self, at: StepIndex, k: int, answered: AnsweredSample) -> Example:
        sample, rollouts = answered.sample, answered.rollouts
        for rollout in rollouts:
            check_prompt(sample.image.path, rollout.prompt_ids, sample.prompt_ids)
            check_version(rollout, at.step, self.max_staleness)
        training_set, truth = self.training_set, sample.truth
        table, order, settings = training_set.table, training_set.order, training_set.settings
        choice = choose_answer([rollout.ids for rollout in rollouts], truth, table=table, settings=settings)
        correction = correct(
            sample.prompt_ids,
            rollouts[choice.index].ids,
            truth,
            table=table,
            order=order,
            settings=settings,
            agreed=choice.agreed,
            complete=sample.complete,
        )
        mode = answered.requests[choice.index].decode.mode
        self.metrics.add(count_rollout(rollouts, choice, mode, correction, truth, at.step))
        id = self._id(at, k)
        if self.watch is not None:
            self.watch(id, answered, choice, correction)
        return _make_example(id, sample, correction.segment, "B")

    def _id(self, at: StepIndex, k: int) -> ExampleId:
        return ExampleId(at.step, at.micro, self.rank, k)


def _make_example(
    id: ExampleId, sample: TrainingSample | ChatSample, segment: Segment, channel: Channel
) -> Example:
    image, size = (sample.image.path, sample.image.size) if sample.image else (None, (0, 0))
    return Example(segment, image, size, channel, id, sample.data_set)


def takes_rollouts(step: int, b_ratio: Fraction) -> bool:
    """Return True if the step trains on rollouts. Of the first n steps, b_ratio * n do, rounded down."""
    return int((step + 1) * b_ratio) > int(step * b_ratio)
