"""Evaluation on questions: the learner answers held-out chat records greedily, and its answers are compared."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed as dist

from coordexp.data import ChatRecord, DataError, Records
from coordexp.files import BestEffort, write_whole
from coordexp.ranks import gather_texts, together
from coordexp.rollout.backend import Decode, ImageRef, Request, TextRequest
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.train.callbacks import say
from coordexp.train.evaluation import collect_rollouts, evenly_spaced


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
    """Evaluates sets of questions, by name. `samples` limits the number of records of a set. `is_stopping` and
    `progress` are those of `AnswerEvaluation`."""

    sets: Mapping[str, QuestionSet]
    backend: HuggingFaceBackend
    folder: Path
    samples: int | None = None
    is_stopping: Callable[[], bool] | None = None
    progress: Callable[[int, int], None] | None = None

    def __call__(self, step: int) -> dict[str, float]:
        """Return the accuracy on each set, the same on every rank. Rank 0 writes the answers. Raise Stopped, on
        all ranks, if the run is asked to stop before the last answer."""
        return {f"accuracy_{name}": self._evaluate(step, name, data) for name, data in self.sets.items()}

    def _evaluate(self, step: int, name: str, data: QuestionSet) -> float:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        chosen = evenly_spaced(len(data.records), self.samples)
        own = together(partial(_read_questions, data, chosen[rank::ranks]))
        decode = Decode.greedy(data.max_new_tokens)
        requests = [_make_request(record, image, decode) for record, image in own]
        rollouts = collect_rollouts(
            self.backend, requests, len(chosen), ranks, is_stopping=self.is_stopping, progress=self.progress
        )
        lines = [
            _describe_answer(record, rollout.text) for (record, _), rollout in zip(own, rollouts, strict=True)
        ]
        by_rank = [json.loads(text) for text in gather_texts(json.dumps(lines))]
        answers = [by_rank[k % ranks][k // ranks] for k in range(len(chosen))]
        if rank == 0:
            file = self.folder / "evaluations" / f"step-{step}-{name}.jsonl"
            BestEffort("answers", say).attempt(partial(_write_answers, file, answers))
        return sum(answer["right"] for answer in answers) / len(answers)


def is_right(answer: str, expected: str) -> bool:
    """Return whether an answer is the expected one, except for case, for white space at its ends, and for the
    amount of white space between words."""
    return _normalise(answer) == _normalise(expected)


def _normalise(text: str) -> str:
    return " ".join(text.casefold().split())


def _read_questions(data: QuestionSet, indices: Sequence[int]) -> list[tuple[ChatRecord, ImageRef | None]]:
    return [data.read(index) for index in indices]


def _make_request(record: ChatRecord, image: ImageRef | None, decode: Decode) -> Request | TextRequest:
    if image is None:
        return TextRequest(record.question, decode)
    return Request(image, decode, question=record.question)


def _describe_answer(record: ChatRecord, text: str) -> dict[str, Any]:
    return {
        "image": record.image,
        "question": record.question,
        "expected": record.answer,
        "answer": text,
        "right": is_right(text, record.answer),
    }


def _write_answers(file: Path, answers: Sequence[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers))
