"""Evaluation: the model answers the held-out images, which are shared out over the ranks."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import distributed as dist

from coordexp.answers.formats import AnswerFormat
from coordexp.config import RolloutMatching
from coordexp.data import Questions, Record, Records
from coordexp.evaluate import ImageAnswer, evaluate, read_truth, write_predictions
from coordexp.evaluate.answer import build_answer, parse_answer
from coordexp.evaluate.report import ImageReport
from coordexp.files import BestEffort
from coordexp.ranks import gather_texts, together
from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout, RolloutBackend, TextRequest, Weights
from coordexp.train.callbacks import say
from coordexp.train.stopping import Stopped


@dataclass(frozen=True)
class AnswerEvaluation:
    """Evaluates greedily. Unlike `coordexp predict`, it uses the repeat guard if the settings enable it. Only the
    backend's `decode_batch_size` sets how many sequences are decoded at once. `samples` limits the number of
    records. `is_stopping` is called between two calls of the backend, on all ranks together. `progress` gets the
    number of answered images and the number of all images. `show` gets all images, each with its file and its
    question, on rank 0."""

    records: Records
    questions: Questions
    backend: RolloutBackend
    weights: Weights
    answers: AnswerFormat
    rollout_matching_cfg: RolloutMatching
    folder: Path
    samples: int | None = None
    is_stopping: Callable[[], bool] | None = None
    progress: Callable[[int, int], None] | None = None
    show: Callable[[Sequence[tuple[ImageReport, Path, str]]], None] | None = None

    def __call__(self, step: int) -> dict[str, float]:
        """Return the same numbers on every rank; rank 0 computes them. It also writes the predictions, as
        `coordexp predict` does. Raise Stopped, on all ranks, if the run is asked to stop before the last
        answer."""
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        chosen = evenly_spaced(len(self.records), self.samples)
        answers = _gather_answers(together(partial(self._answer_images, chosen, rank, ranks, step)))
        metrics = together(partial(self._score, step, chosen, answers)) if rank == 0 else together(dict)
        return json.loads(gather_texts(json.dumps(metrics))[0])

    def _score(self, step: int, chosen: Sequence[int], answers: Sequence[ImageAnswer]) -> dict[str, float]:
        """Return the numbers of an evaluation. Write the predictions, with the classes of all records, numbered as
        by `coordexp predict`."""
        ordered = sorted(answers, key=attrgetter("image_id"))
        file = self.folder / "evaluations" / f"step-{step}.json"
        classes = read_truth(self.records)
        BestEffort("predictions", say).attempt(partial(write_predictions, file, ordered, classes))
        truth = [self.records.read_with_image_id(index) for index in chosen]
        report = evaluate(truth, ordered)
        if self.show is not None:
            files = [self.records.locate(index)[0] for index in chosen]
            self.show(
                [
                    (image, file.image_path(record), self.questions.ask(record))
                    for image, file, (_, record) in zip(report.images, files, truth, strict=True)
                ]
            )
        return report.metrics()

    def _answer_images(self, chosen: Sequence[int], rank: int, ranks: int, step: int) -> list[ImageAnswer]:
        numbered = together(partial(self._read_records, chosen[rank::ranks]))
        decode = Decode.for_evaluation(self.rollout_matching_cfg)
        requests = [Request(image, decode, question=self.questions.ask(record)) for _, record, image in numbered]
        with self.backend.session():
            self.backend.sync(self.weights, version=step)
            rollouts = collect_rollouts(
                self.backend, requests, len(chosen), ranks, is_stopping=self.is_stopping, progress=self.progress
            )
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


def collect_rollouts(
    backend: Any,
    requests: Sequence[Request | TextRequest],
    total: int,
    ranks: int,
    *,
    is_stopping: Callable[[], bool] | None,
    progress: Callable[[int, int], None] | None,
) -> list[Rollout]:
    """Return the answers to this rank's requests, of `total` on all ranks. All ranks make the same calls. In the
    last one, some ranks may have no requests left. Raise Stopped if the run is asked to stop."""
    size, rollouts, show = backend.requests_per_call, list[Rollout](), progress or _show_nothing
    together(partial(show, 0, total))
    for start in range(0, -(-total // ranks), size):
        if is_stopping is not None and is_stopping():
            raise Stopped
        done = min(total, (start + size) * ranks)
        rollouts += together(
            partial(_generate, backend, requests[start : start + size], partial(show, done, total))
        )
    return rollouts


def _generate(backend: Any, requests: Sequence[Request | TextRequest], show: Callable[[], None]) -> list[Rollout]:
    """Generate, and show the progress. Both are part of one `together`, so that an error of either is an error of
    all ranks."""
    rollouts: list[Rollout] = backend.generate(requests)
    show()
    return rollouts


def _show_nothing(done: int, total: int) -> None:
    pass


def evenly_spaced(count: int, most: int | None) -> Sequence[int]:
    """Return the indices of at most `most` of `count` records: the same ones every time, from all parts of the
    file."""
    chosen = count if most is None else min(count, most)
    return [k * count // chosen for k in range(chosen)]


def _gather_answers(answers: list[ImageAnswer]) -> list[ImageAnswer]:
    """Return the answers of all ranks, on rank 0."""
    if not dist.is_initialized():
        return answers
    texts = gather_texts("\n".join(json.dumps(asdict(answer)) for answer in answers))
    if dist.get_rank() != 0:
        return []
    return [parse_answer(line) for text in texts for line in text.splitlines()]
