"""Predict with Ray: actors on the GPUs of a machine or of a cluster make the shards of a data file.

    python examples/ray/predict.py --model MODEL --data train.jsonl --out shards --shards 2000 --actors 8 --gpus 1
    coordexp shards merge shards --out preds.json

Ray gets the numbers of shards, never records. `--out` is a folder that all nodes see. A finished shard is skipped.
Ray starts an actor that died again, which goes on with its shard. Needs `coordexp[ray]`.
"""

import argparse
from pathlib import Path

import ray

from coordexp.detect.answering import AnswerOptions
from coordexp.detect.shards import PredictionJob, ShardPredictor

parser = argparse.ArgumentParser(description="Predict with Ray")
parser.add_argument("--model", type=Path, required=True)
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--shards", type=int, required=True)
parser.add_argument("--actors", type=int, default=1)
parser.add_argument("--gpus", type=float, default=0, help="of each actor")
parser.add_argument("--backend", choices=("hf", "vllm"), default="hf")
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--max-new-tokens", type=int, default=1024)


class Actor:
    def __init__(self, job):
        self.predict = ShardPredictor(job, print)

    def __call__(self, rows):
        return {"shard": rows["id"], "is_new": [self.predict(int(number)) for number in rows["id"]]}


if __name__ == "__main__":
    given = parser.parse_args()
    paths = [path.absolute() for path in (given.model, given.data, given.out)]
    options = AnswerOptions(given.max_new_tokens)
    job = PredictionJob(*paths, given.shards, options, given.batch, backend=given.backend)
    ray.init()
    limits = {"num_gpus": given.gpus, "max_restarts": 3, "max_task_retries": 3}  # Ray's own default is for ever
    numbers = [{"id": number} for number in range(given.shards)]
    shards = ray.data.from_items(numbers, override_num_blocks=given.shards)  # `range` would need a processor more
    done = shards.map_batches(
        Actor, fn_constructor_args=(job,), batch_size=1, concurrency=given.actors, **limits
    ).take_all()
    print(f"{sum(row['is_new'] for row in done)} of {len(done)} shards are new")
