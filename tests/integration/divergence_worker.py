"""Make a run in which the logits of the last rank are broken from a step on.

`python divergence_worker.py CONFIG STEP`. Only the fault is injected; the rest is the command itself.
"""

import os
import sys
from typing import Any

import torch

from coordexp.cli import main
from coordexp.train.trainer import RowTrainer

CONFIG, STEP = sys.argv[1], int(sys.argv[2])
RANK, RANKS = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))


class FaultyTrainer(RowTrainer):
    def compute_loss(self, model: Any, inputs: Any, *words: Any, **named: Any) -> Any:
        if self.state.global_step + 1 < STEP or RANK != RANKS - 1:
            return super().compute_loss(model, inputs, *words, **named)
        head = self.learner.head
        project = head._project
        head._project = lambda hidden: project(hidden).index_fill(-1, torch.tensor([3]), torch.nan)
        try:
            return super().compute_loss(model, inputs, *words, **named)
        finally:
            head._project = project


if __name__ == "__main__":
    torch.set_num_threads(1)
    import coordexp.train.run

    coordexp.train.run.RowTrainer = FaultyTrainer  # type: ignore[misc]
    main(["train", "--config", CONFIG])
