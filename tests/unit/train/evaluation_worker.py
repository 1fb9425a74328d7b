"""One of two ranks that evaluate a file of records, with a fake backend: `python -m ... RANK FOLDER`."""

import json
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

from torch import distributed as dist

from coordexp.config.rollout import RolloutMatching
from coordexp.config.settings import Custom
from coordexp.data import DataError, Questions, RecordFile
from coordexp.ranks import RankError
from coordexp.train.evaluation import AnswerEvaluation
from coordexp.train.stopping import StopOnSignal


class FakeBackend:
    requests_per_call = 2

    def session(self):
        return nullcontext()

    def sync(self, weights, version):
        pass

    def generate(self, requests):
        return []


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    stop = StopOnSignal()
    evaluation = AnswerEvaluation(
        RecordFile(folder / "val.jsonl"),
        Questions.of(Custom()),
        FakeBackend(),
        None,
        None,
        RolloutMatching(),
        folder,
        None,
        stop.agree_to_stop,
    )
    try:
        evaluation(step=1)
    except (RankError, DataError) as error:
        outcome = {"error": f"{type(error).__name__}: {error}", "stopped_by": stop.stopped_by}
        (folder / f"rank-{rank}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()
