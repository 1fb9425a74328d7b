"""Evaluation by answering: the held-out pictures are shared out over the ranks and measured together."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from torch import distributed as dist

from coordexp.config import RolloutMatching
from coordexp.data import RecordFile
from coordexp.evaluate import Answer, evaluate, read_truth, write_predictions
from coordexp.evaluate.answer import parse_answer
from coordexp.evaluate.tokens import answer_of
from coordexp.files import BestEffort
from coordexp.ranks import gather_texts, together
from coordexp.rollout.backend import Decode, Picture, Request, Rollout, RolloutBackend, Weights
from coordexp.train.callbacks import say
from coordexp.train.stopping import Stopped
from coordexp.vocab import VocabularyTable


@dataclass(frozen=True)
class AnswerEvaluation:
    """Greedy, as `coordexp predict` is, with the repeat guard if the settings enable it. The backend's
    `decode_batch_size` alone sets how many sequences are decoded at once (R10.S3). `samples` limits the number of
    records. `stopping` is asked between two calls of the backend, on all ranks together, and `progress` gets the
    number of images that are answered, and of all."""

    records: RecordFile
    backend: RolloutBackend
    weights: Weights
    table: VocabularyTable
    rollout_matching_cfg: RolloutMatching
    folder: Path
    samples: int | None = None
    stopping: Callable[[], bool] = lambda: False
    progress: Callable[[int, int], None] = lambda done, total: None

    def __call__(self, step: int) -> dict[str, float]:
        """Return the same numbers on every rank. Rank 0 writes the predictions, as `coordexp predict` does. Raise
        Stopped, on all ranks, if the run is asked to stop before the last answer."""
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        chosen = evenly_spaced(len(self.records), self.samples)
        answers = _gathered(together(lambda: self._answers(chosen, rank, ranks, step)))
        ordered = sorted(answers, key=lambda answer: answer.image_id)
        truth = [self.records.numbered(index) for index in chosen]
        file = self.folder / "evaluations" / f"step-{step}.json"
        together(lambda: self._write(file, ordered) if rank == 0 else None)
        return evaluate(truth, ordered).flat()

    def _write(self, file: Path, answers: Sequence[Answer]) -> None:
        """Write the predictions with the classes of all records, as `coordexp predict` numbers them."""
        truth = read_truth(self.records)
        BestEffort("predictions", say).attempt(lambda: write_predictions(file, answers, truth))

    def _answers(self, chosen: Sequence[int], rank: int, ranks: int, step: int) -> list[Answer]:
        numbered = together(lambda: [self.records.numbered(index) for index in chosen[rank::ranks]])
        decode = Decode.for_evaluation(self.rollout_matching_cfg)
        requests = [Request(Picture.of(self.records, record), decode) for _, record in numbered]
        with self.backend.session():
            self.backend.sync(self.weights, version=step)
            rollouts = self._rollouts(requests, len(chosen), ranks)
        return [
            answer_of(number, record.image, rollout, self.table)
            for (number, record), rollout in zip(numbered, rollouts, strict=True)
        ]

    def _rollouts(self, requests: Sequence[Request], total: int, ranks: int) -> list[Rollout]:
        """Return the answers to this rank's requests. All ranks make the same calls, some perhaps without requests
        in the last one."""
        size, found = self.backend.requests_per_call, list[Rollout]()
        self.progress(0, total)
        for start in range(0, -(-total // ranks), size):
            if self.stopping():
                raise Stopped
            done = min(total, (start + size) * ranks)
            found += together(partial(self._call, requests[start : start + size], done, total))
        return found

    def _call(self, requests: Sequence[Request], done: int, total: int) -> list[Rollout]:
        rollouts = self.backend.generate(requests)
        self.progress(done, total)
        return rollouts


def evenly_spaced(count: int, most: int | None) -> Sequence[int]:
    """Return the indices of at most `most` of `count` records: the same ones every time, from all parts of the
    file."""
    chosen = count if most is None else min(count, most)
    return [k * count // chosen for k in range(chosen)]


def _gathered(answers: list[Answer]) -> list[Answer]:
    """The answers of all ranks, on all ranks."""
    if not dist.is_initialized():
        return answers
    texts = gather_texts("\n".join(json.dumps(asdict(answer)) for answer in answers))
    return [parse_answer(line) for text in texts for line in text.splitlines()]
