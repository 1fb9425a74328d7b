"""Correct mutated rollouts, and check each as the property tests do.

    python benchmarks/fuzz_core.py --count 1000000

The command prints its progress. It stops at the first rollout that breaks a property and prints the seed, with
which `--seed N --count 1` makes the rollout again.
"""

import argparse
import itertools
import json
import multiprocessing
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.rollouts import check_rollout, random_rollout, random_truth
from tests.vocabularies import table

VOCABULARIES = ["qwen", "small", *(f"random-{seed}" for seed in range(200))]
BATCH = 500


def check_seeds(first: int, count: int) -> int:
    """Check the rollouts of these seeds, and return their number."""
    for seed in range(first, first + count):
        chooser = random.Random(seed)
        vocabulary = table(VOCABULARIES[seed % len(VOCABULARIES)])
        truth = random_truth(chooser)
        ids = random_rollout(chooser, truth, vocabulary)
        try:
            check_rollout(ids, truth, vocabulary, chooser.choice(("desc_first", "geometry_first")))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ends = [*range(options.seed, options.seed + options.count, BATCH), options.seed + options.count]
    batches = [(start, end - start) for start, end in itertools.pairwise(ends)]
    done, started, last_print = 0, time.time(), 0.0
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for count in pool.imap_unordered(_check_batch, batches):
            done += count
            if time.time() - last_print > 10 or done == options.count:
                last_print = time.time()
                rate = done / (last_print - started)
                print(
                    f"{done:,} of {options.count:,} checked, {rate:,.0f} per second", file=sys.stderr, flush=True
                )
    result = {
        "mutated rollouts without a broken property": {"value": done, "goal": 1_000_000, "ok": done >= 1_000_000}
    }
    print(json.dumps(result) if options.json else f"{done:,} rollouts, no property broken")


def _check_batch(batch: tuple[int, int]) -> int:
    return check_seeds(*batch)


if __name__ == "__main__":
    main()
