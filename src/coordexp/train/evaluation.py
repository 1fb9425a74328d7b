"""Evaluation by answering: the held-out pictures are shared out over the ranks and measured together."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from coordexp.config import RolloutMatching
from coordexp.data import RecordFile
from coordexp.evaluate import Answer, evaluate, write_predictions
from coordexp.evaluate.answer import parse_answer
from coordexp.evaluate.tokens import answer_of
from coordexp.rollout.generate import generate
from coordexp.rollout.generated import Picture
from coordexp.rollout.prompt import PromptBuilder
from coordexp.vocab import VocabularyTable


@dataclass(frozen=True)
class AnswerEvaluation:
    """`decode_batch_size` alone sets how many sequences are decoded at once (R10.S3)."""

    records: RecordFile
    prompts: PromptBuilder
    table: VocabularyTable
    settings: RolloutMatching
    folder: Path

    def __call__(self, model: Any, step: int) -> dict[str, float]:
        """On every rank the same numbers. Rank 0 writes the predictions, as `coordexp predict` does."""
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        mine = range(rank, len(self.records), ranks)
        # Sharded models generate in step with each other: every rank makes as many calls as the busiest.
        calls = -(-len(range(0, len(self.records), ranks)) // self.settings.decode_batch_size)
        answers: list[Answer] = []
        for call in range(calls):
            size = self.settings.decode_batch_size
            indices = mine[call * size : (call + 1) * size] or mine[:1] or range(1)
            answers += self._answers(model, indices, lockstep=ranks > 1)
        whole = {answer.image_id: answer for answer in _gathered(answers)}
        ordered = [whole[image_id] for image_id in sorted(whole)]
        truth = [self.records.numbered(index) for index in range(len(self.records))]
        if rank == 0:
            write_predictions(self.folder / "evaluations" / f"step-{step}.json", ordered, truth)
        return evaluate(truth, ordered).flat()

    def _answers(self, model: Any, indices: Sequence[int], lockstep: bool) -> list[Answer]:
        numbered = [self.records.numbered(index) for index in indices]
        pictures = [Picture.of(self.records, record) for _, record in numbered]
        found = generate(
            model,
            self.prompts,
            pictures,
            max_new_tokens=self.settings.max_new_tokens,
            end_of_turn=self.table.end_of_turn,
            lockstep=lockstep,
        )
        return [
            answer_of(number, record.image, generated, self.table)
            for (number, record), generated in zip(numbered, found, strict=True)
        ]


def _gathered(answers: list[Answer]) -> list[Answer]:
    """The answers of all ranks, on all ranks. As JSON in byte tensors: nothing is unpickled."""
    if not dist.is_initialized():
        return answers
    text = "\n".join(json.dumps(asdict(answer)) for answer in answers).encode()
    device = (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    )
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(text)], device=device))
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8, device=device)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    parts = [torch.zeros_like(mine) for _ in sizes]
    dist.all_gather(parts, mine)
    lines = [
        line
        for part, size in zip(parts, sizes, strict=True)
        for line in bytes(part[: int(size)].tolist()).splitlines()
    ]
    return [parse_answer(line) for line in lines]
