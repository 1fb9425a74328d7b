"""One of two ranks that choose a checkpoint: `python -m ... RANK FOLDER`. Writes the choice for each run
folder."""

import json
import sys
from datetime import timedelta
from pathlib import Path

from torch import distributed as dist

from coordexp.errors import DataError
from coordexp.ranks import RankError
from coordexp.train import checkpoints
from coordexp.train.run import _checkpoint

if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    if rank:
        checkpoints.hash_files = None  # only the first rank reads
    outcome = {}
    for run in ("damaged", "hopeless"):
        try:
            outcome[run] = str(_checkpoint(folder / run, resume=True))
        except (RankError, DataError) as error:
            outcome[run] = f"{type(error).__name__}: {error}"
    (folder / f"rank-{rank}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()
