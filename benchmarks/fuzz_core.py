"""Mutated rollouts through the token core, each checked as the property tests check it.

    python benchmarks/fuzz_core.py --count 1000000

Prints progress, and stops at the first rollout that breaks a property, with the seed that makes it again
(`--seed N --count 1`).
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


def run(first: int, count: int) -> int:
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
    done, started, shown = 0, time.time(), 0.0
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for count in pool.imap_unordered(_run, batches):
            done += count
            if time.time() - shown > 10 or done == options.count:
                shown = time.time()
                rate = done / (shown - started)
                print(f"{done:,} of {options.count:,} sound, {rate:,.0f} a second", file=sys.stderr, flush=True)
    result = {
        "mutated rollouts without a broken property": {"value": done, "goal": 1_000_000, "ok": done >= 1_000_000}
    }
    print(json.dumps(result) if options.json else f"{done:,} rollouts, no property broken")


def _run(batch: tuple[int, int]) -> int:
    return run(*batch)


if __name__ == "__main__":
    main()
