"""Evaluation: held-out images and questions are answered greedily. The ranks take turns."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from coordexp.answers.formats import AnswerFormat
from coordexp.config import RolloutMatching
from coordexp.data import ChatRecord, DataError, Questions, Record, Records
from coordexp.evaluate import ImageAnswer, evaluate, read_truth, write_predictions
from coordexp.evaluate.answer import build_answer, parse_answer
from coordexp.evaluate.report import ImageReport
from coordexp.files import BestEffort, write_whole
from coordexp.logs import say
from coordexp.ranks import find_rank, gather_texts, together
from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout, RolloutBackend, TextRequest, Weights
from coordexp.rollout.prompt import read_image
from coordexp.tasks import ignore
from coordexp.train.pictures import Shown
from coordexp.train.stopping import Stopped


def _go_on() -> bool:
    return False


@dataclass(frozen=True)
class Asking:
    """How held-out records are answered. Results are written to `folder`, that of the run. `samples` limits the
    number of records of each file. `is_stopping` is called between two calls of a backend, on all ranks together.
    `progress` gets the number of answered records and the number of all."""

    folder: Path
    samples: int | None = None
    is_stopping: Callable[[], bool] = _go_on
    progress: Callable[[int, int], None] = ignore

    def choose(self, records: Records) -> tuple[Sequence[int], Sequence[int]]:
        """Return the indices of the records to answer: on all ranks, and on this one."""
        chosen, (rank, ranks) = evenly_spaced(len(records), self.samples), find_rank()
        return chosen, chosen[rank::ranks]

    def ask(self, backend: Any, requests: Sequence[Request | TextRequest], total: int) -> list[Rollout]:
        """Return the answers to this rank's requests, of `total` on all ranks. All ranks make the same calls. In
        the last one, some ranks may have no requests left. Raise Stopped, on all ranks, if the run is asked to
        stop."""
        size, ranks, rollouts = backend.requests_per_call, find_rank()[1], list[Rollout]()
        together(partial(self.progress, 0, total))
        for start in range(0, -(-total // ranks), size):
            if self.is_stopping():
                raise Stopped
            done = min(total, (start + size) * ranks)
            rollouts += together(partial(self._generate, backend, requests[start : start + size], done, total))
        return rollouts

    def _generate(self, backend: Any, requests: Sequence[Any], done: int, total: int) -> list[Rollout]:
        """Generate, and show the progress. Both are part of one `together`, so that an error of either is an error
        of all ranks."""
        rollouts: list[Rollout] = backend.generate(requests)
        self.progress(done, total)
        return rollouts


def evenly_spaced(count: int, most: int | None) -> Sequence[int]:
    """Return the indices of at most `most` of `count` records: the same ones every time, from all parts of the
    file."""
    chosen = count if most is None else min(count, most)
    return [k * count // chosen for k in range(chosen)]


def _gather_lines(own: Sequence[str], total: int) -> list[str]:
    """Return the lines of all ranks in the order of the records."""
    by_rank = [text.split("\n") for text in gather_texts("\n".join(own))]
    return [by_rank[k % len(by_rank)][k // len(by_rank)] for k in range(total)]


@dataclass(frozen=True)
class AnswerEvaluation:
    """Evaluates on records with objects. Unlike `coordexp predict`, it uses the repeat guard if the settings
    enable it. Only the backend's `decode_batch_size` sets how many sequences are decoded at once. `show` gets
    `pictures` of the images, evenly spaced, on rank 0."""

    records: Records
    questions: Questions
    backend: RolloutBackend
    weights: Weights
    answers: AnswerFormat
    rollout_matching_cfg: RolloutMatching
    asking: Asking
    show: Callable[[Sequence[Shown]], None] = ignore
    pictures: int = 0

    def __call__(self, step: int) -> dict[str, float]:
        """Return the same numbers on every rank; rank 0 computes them. It also writes the predictions, as
        `coordexp predict` does. Raise Stopped, on all ranks, if the run is asked to stop before the last
        answer."""
        chosen, own = self.asking.choose(self.records)
        answers = together(partial(self._answer_images, own, len(chosen), step))
        lines = _gather_lines([json.dumps(asdict(answer)) for answer in answers], len(chosen))
        metrics = together(partial(self._score, step, chosen, lines) if find_rank()[0] == 0 else dict)
        return json.loads(gather_texts(json.dumps(metrics))[0])

    def _answer_images(self, own: Sequence[int], total: int, step: int) -> list[ImageAnswer]:
        numbered = together(partial(self._read_records, own))
        decode = Decode.for_evaluation(self.rollout_matching_cfg)
        requests = [Request(image, decode, question=self.questions.ask(record)) for _, record, image in numbered]
        with self.backend.session():
            self.backend.sync(self.weights, version=step)
            rollouts = self.asking.ask(self.backend, requests, total)
        return [
            build_answer(number, record.image, rollout, self.answers)
            for (number, record, _), rollout in zip(numbered, rollouts, strict=True)
        ]

    def _read_records(self, indices: Sequence[int]) -> list[tuple[int, Record, ImageRef]]:
        numbered = []
        for index in indices:
            number, record = self.records.read_with_image_id(index)
            file, _ = self.records.locate(index)
            numbered.append((number, record, ImageRef.of(file, record)))
        return numbered

    def _score(self, step: int, chosen: Sequence[int], lines: Sequence[str]) -> dict[str, float]:
        """Return the numbers of an evaluation. Write the predictions, with the classes of all records, numbered as
        by `coordexp predict`."""
        answers, file = list(map(parse_answer, lines)), self.asking.folder / "evaluations" / f"step-{step}.json"
        classes = read_truth(self.records)
        BestEffort("predictions", say).attempt(partial(write_predictions, file, answers, classes))
        report = evaluate([self.records.read_with_image_id(index) for index in chosen], answers)
        shown = evenly_spaced(len(chosen), self.pictures)
        self.show([image for k in shown for image in self._picture(chosen[k], report.images[k])])
        return report.metrics()

    def _picture(self, index: int, report: ImageReport) -> list[Shown]:
        """Return an image as it is shown, or nothing if it cannot be read: the evaluation has counted that."""
        record = self.records.read_with_image_id(index)[1]
        path = self.records.locate(index)[0].image_address(record)
        try:
            return [(read_image(path, path), report, self.questions.ask(record))]
        except DataError:
            return []


@dataclass(frozen=True)
class QuestionSet:
    """Held-out chat records. An answer has at most `max_new_tokens`."""

    records: Records
    max_new_tokens: int

    def read(self, index: int) -> tuple[ChatRecord, ImageRef | None]:
        """Return a record and its image. Raise DataError if it is not a chat record."""
        file, number = self.records.locate(index)
        record = file.read(number)
        if not isinstance(record, ChatRecord):
            raise DataError(
                f"{file}, record {number + 1}: custom.eval_data has questions and answers, and this has objects",
                "list records with objects in custom.val_jsonl",
            )
        return record, None if record.image is None else ImageRef.of(file, record)


@dataclass(frozen=True)
class ChatEvaluation:
    """Evaluates sets of questions, by name: the answers of the learner are compared with those of the records. The
    backend has to take a `TextRequest`, too."""

    sets: Mapping[str, QuestionSet]
    backend: Any
    asking: Asking

    def __call__(self, step: int) -> dict[str, float]:
        """Return the accuracy on each set, the same on every rank. Rank 0 writes the answers. Raise Stopped, on
        all ranks, if the run is asked to stop before the last answer."""
        return {f"accuracy_{name}": self._evaluate(step, name, data) for name, data in self.sets.items()}

    def _evaluate(self, step: int, name: str, data: QuestionSet) -> float:
        chosen, own = self.asking.choose(data.records)
        records = together(lambda: [data.read(index) for index in own])
        decode = Decode.greedy(data.max_new_tokens)
        requests = [
            TextRequest(record.question, decode)
            if image is None
            else Request(image, decode, question=record.question)
            for record, image in records
        ]
        rollouts = self.asking.ask(self.backend, requests, len(chosen))
        own_lines = [
            _describe_answer(record, rollout.text) for (record, _), rollout in zip(records, rollouts, strict=True)
        ]
        lines = _gather_lines(own_lines, len(chosen))
        if find_rank()[0] == 0:
            file = self.asking.folder / "evaluations" / f"step-{step}-{name}.jsonl"
            BestEffort("answers", say).attempt(partial(write_whole, file, "".join(f"{line}\n" for line in lines)))
        return sum(json.loads(line)["right"] for line in lines) / len(lines)


def is_right(answer: str, expected: str) -> bool:
    """Return whether an answer is the expected one, except for case, for white space at its ends, and for the
    amount of white space between words."""
    return answer.casefold().split() == expected.casefold().split()


def _describe_answer(record: ChatRecord, text: str) -> str:
    """Return the line of an answer in the file of an evaluation."""
    right = is_right(text, record.answer)
    asked = {"image": record.image, "question": record.question, "expected": record.answer}
    return json.dumps(asked | {"answer": text, "right": right}, ensure_ascii=False)
