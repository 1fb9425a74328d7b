"""One of two learner ranks, each with a fake engine of its own: `python colocate_worker.py RANK FOLDER`.

The engine of rank 1 refuses the second adapter. The worker writes the result, for a run that may fall back and for
one that may not.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch import distributed as dist

from coordexp.errors import EngineError
from coordexp.ranks import sum_over_ranks
from tests.unit.rollout.fake_engine import Run

REFUSAL = "the engine cannot use the adapter: LoRA rank 16 is greater than max_lora_rank 8"


def main(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    with pytest.MonkeyPatch.context() as patch:
        run = Run(patch, {"mode": "adapter"})
        run.step(1)
        run.refusal = REFUSAL if rank == 1 else ""
        run.step(2)
        run.refusal = ""
        run.step(3)
        result = {"sent": run.sent, "warnings": run.warnings, "stopped": ""}
        strict = Run(patch, {"mode": "adapter", "fallback_to_full": False})
        strict.refusal = REFUSAL if rank == 1 else ""
        try:
            strict.step(1)
        except EngineError as error:
            result["stopped"] = str(error)
    result["in step"] = sum_over_ranks([7.0]) == [14.0]
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
