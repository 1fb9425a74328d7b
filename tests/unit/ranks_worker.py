"""One of two ranks: `python ranks_worker.py RANK FOLDER SCENE...`. It writes the outcome of each scene.

After every scene both ranks sum up a number. A rank that still waits in a call that the other one has left would
get another sum, or wait until the timeout of the group.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as dist

from coordexp.ranks import control_group, gather_texts, max_over_ranks, sum_over_ranks, together


def success(rank: int) -> Any:
    return together(lambda: f"work of {rank}")


def one_fails(rank: int) -> Any:
    return together(lambda: _fail("no such image: é.png") if rank == 1 else "fine")


def both_fail(rank: int) -> Any:
    return together(lambda: _fail(f"fault of {rank}"))


def the_inner_one_fails(rank: int) -> Any:
    return together(lambda: together(lambda: _fail("inside") if rank == 1 else "fine"))


def early_failure(rank: int) -> Any:
    """Rank 1 fails before the nested call at which rank 0 waits."""

    def work() -> str:
        if rank == 1:
            _fail("before all")
        for _ in range(3):
            together(lambda: None)
        return "fine"

    return together(work)


def early_failure_between(rank: int) -> Any:
    """Rank 1 fails between two nested calls, inside a third one."""

    def work() -> None:
        together(lambda: None)
        together(lambda: _fail("on the way") if rank == 1 else together(lambda: None))

    return together(work)


def waiting(rank: int) -> Any:
    seconds: list[float] = []
    together(lambda: time.sleep(0.5 * rank), waited=seconds.append)
    return seconds


def texts(rank: int) -> Any:
    return gather_texts("" if rank else "cup é 🙂" * 1000)


def group(rank: int) -> Any:
    control = control_group()
    return [dist.get_backend(control), control is dist.group.WORLD, control is control_group()]


def sums(rank: int) -> Any:
    return [*sum_over_ranks([1.0 + rank, 2.0**52]), max_over_ranks(7 - rank)]


def rank_killed(rank: int) -> Any:
    """Rank 1 is gone while rank 0 waits for it in a nested call."""

    def work() -> str:
        together(lambda: None)
        if rank == 1:
            os._exit(9)
        return together(lambda: "alone")

    return together(work)


def _fail(text: str) -> None:
    raise FileNotFoundError(text)


def _run_scene(scene: Callable[[int], Any], rank: int) -> dict[str, Any]:
    since = time.perf_counter()
    try:
        outcome = {"returned": scene(rank)}
    except Exception as error:  # noqa: BLE001
        outcome = {"raised": type(error).__name__, "text": str(error)}
    return outcome | {"seconds": time.perf_counter() - since}


def main(rank: int, folder: Path, scenes: list[str]) -> None:
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    report = {}
    for name in scenes:
        report[name] = _run_scene(globals()[name], rank)
        if name != "rank_killed":
            report[name]["in step"] = sum_over_ranks([7.0]) == [14.0]
        (folder / f"rank-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
