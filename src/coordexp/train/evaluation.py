"""Evaluation by answering: the held-out pictures are shared out over the ranks and measured together."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import distributed as dist

from coordexp.config import RolloutMatching
from coordexp.data import RecordFile
from coordexp.evaluate import Answer, evaluate, write_predictions
from coordexp.evaluate.answer import parse_answer
from coordexp.evaluate.predictions import Truth
from coordexp.evaluate.tokens import answer_of
from coordexp.files import BestEffort
from coordexp.ranks import gather_texts, together
from coordexp.rollout.backend import Decode, Picture, Request, RolloutBackend, Weights
from coordexp.train.callbacks import say
from coordexp.vocab import VocabularyTable


@dataclass(frozen=True)
class AnswerEvaluation:
    """Greedy, as `coordexp predict` is, with the repeat guard if the settings enable it. The backend's
    `decode_batch_size` alone sets how many sequences are decoded at once (R10.S3)."""

    records: RecordFile
    backend: RolloutBackend
    weights: Weights
    table: VocabularyTable
    rollout_matching_cfg: RolloutMatching
    folder: Path

    def __call__(self, step: int) -> dict[str, float]:
        """On every rank the same numbers. Rank 0 writes the predictions, as `coordexp predict` does."""
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        answers = _gathered(together(lambda: self._answers(range(rank, len(self.records), ranks), step)))
        ordered = sorted(answers, key=lambda answer: answer.image_id)
        truth = [self.records.numbered(index) for index in range(len(self.records))]
        file = self.folder / "evaluations" / f"step-{step}.json"
        together(lambda: self._write(file, ordered, truth) if rank == 0 else None)
        return evaluate(truth, ordered).flat()

    def _write(self, file: Path, answers: Sequence[Answer], truth: Truth) -> None:
        BestEffort("predictions", say).attempt(lambda: write_predictions(file, answers, truth))

    def _answers(self, indices: Sequence[int], step: int) -> list[Answer]:
        numbered = [self.records.numbered(index) for index in indices]
        decode = Decode.for_evaluation(self.rollout_matching_cfg)
        requests = [Request(Picture.of(self.records, record), decode) for _, record in numbered]
        with self.backend.session():
            self.backend.sync(self.weights, version=step)
            rollouts = self.backend.generate(requests)
        return [
            answer_of(number, record.image, rollout, self.table)
            for (number, record), rollout in zip(numbered, rollouts, strict=True)
        ]


def _gathered(answers: list[Answer]) -> list[Answer]:
    """The answers of all ranks, on all ranks."""
    if not dist.is_initialized():
        return answers
    texts = gather_texts("\n".join(json.dumps(asdict(answer)) for answer in answers))
    return [parse_answer(line) for text in texts for line in text.splitlines()]
