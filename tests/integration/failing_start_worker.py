"""One of two learner ranks that start an engine each: `python failing_start_worker.py RANK FOLDER`.

The device of rank 1 has too little memory for the model. The worker writes the error, and whether the ranks are
still in step.
"""

import json
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from vllm.v1.worker.cpu_worker import CPUWorker

from coordexp.answers.table import VocabularyTable
from coordexp.config import RolloutMatching
from coordexp.errors import UserError
from coordexp.ranks import sum_over_ranks, together
from coordexp.rollout.start import EngineSetup, start_engine
from tests.integration.stage2_runs import MODEL

VLLM = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.05, "enforce_eager": True, "max_model_len": 256}


def main(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=100))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 3 GiB.")

    settings, table = RolloutMatching.model_validate({"vllm": VLLM}), VocabularyTable.from_folder(MODEL)
    setup = EngineSetup(MODEL, "float32", settings, table, torch.device("cpu"))
    began, error = time.monotonic(), ""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(CPUWorker, "load_model", fail)
        try:
            together(partial(start_engine, setup))
        except UserError as failed:
            error = str(failed)
    result = {"error": error, "seconds": time.monotonic() - began, "in step": sum_over_ranks([7.0]) == [14.0]}
    (folder / f"rank-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
