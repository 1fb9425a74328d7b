"""One of two learner ranks: `python servers_worker.py RANK FOLDER`. Writes what came of each scene.

The fake servers are threads of rank 0. After every scene both ranks add up a number, so that one which still waits
in a call that the other has left would be seen.
"""

import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from torch import distributed as dist

from coordexp.ranks import gather_texts, sum_over_ranks, together
from coordexp.rollout import server_backend
from tests.fake_server import changed, dies, garbage, slow, status
from tests.unit.rollout.served import Run, right

server_backend.AGAIN = 0.05


def in_turn(rank, it):
    """Syncs and answers, with another number of requests on each rank."""
    found = []
    for version in (1, 2, 2, 3):
        it.sync(version)
        count = 5 if rank else 3
        found.append(right(it.generate(count, 100 * rank), version, 100 * rank))
    starts = [one.paths().count("/start_update/") for one in it.servers] if rank == 0 else None
    return {"right": found, "starts": starts, "recorded": [one["event"] for one in it.recorded]}


def lost_by_one(rank, it):
    """A server dies while a rank asks it; then both leave it out, and it comes back for both."""
    it.sync(1)
    if rank == 0:
        it.servers[1].faults["/infer/"].append(dies)
    first = right(it.generate(4, 100 * rank), 1, 100 * rank)
    left = it.backend.pool.usable
    if rank == 0:
        it.servers[1].restart()
    it.sync(1)
    again = right(it.generate(4, 100 * rank), 1, 100 * rank)
    return {"right": [first, again], "usable": [left, it.backend.pool.usable]}


def all_lost(rank, it):
    """Rank 1 has no request, and takes part all the same in giving the servers their weights again."""
    it.sync(1)
    if rank == 0:
        for one in it.servers:
            one.faults["/infer/"].append(dies)
        threading.Timer(0.4, it.servers[0].restart).start()
    count = 0 if rank else 4
    return {"right": [right(it.generate(count), 1)], "usable": [it.backend.pool.usable]}


def none_comes_back(rank, it):
    it.sync(1)
    if rank == 0:
        for one in it.servers:
            one.die()
    it.generate(2)


def another_model(rank, it):
    if rank == 0:
        it.servers[1].about = it.servers[1].about | {"model": {}}
    it.sync(1)


def unreadable(rank, it):
    """Only the first call is: whichever rank it meets, both end."""
    it.sync(1)
    if rank == 0:
        for one in it.servers:
            one.faults["/infer/"] += [garbage(), garbage(), garbage(), garbage()]
    together(lambda: None)
    it.generate(1)


def one_bad_request(rank, it):
    it.sync(1)
    if rank == 0:
        error = {"error": {"code": "bad_request", "message": "no such picture", "fix": "copy it"}}
        for one in it.servers:
            one.faults["/infer/"].append(changed(lambda items: [error] * len(items)))
    together(lambda: None)
    it.generate(1 if rank == 0 else 0)


def faults_in_sync(rank, it):
    it.sync(1)
    if rank == 0:
        it.servers[0].faults["/finish_update/"].append(status(500, "update_failed"))
        it.servers[1].faults["/infer/"].append(slow(0.5))
    it.sync(2)
    return {"right": [right(it.generate(3), 2)], "usable": [it.backend.pool.usable]}


def no_weight_group(rank, it):
    """The port of the weight group of one server never opens."""
    if rank == 0:
        it.servers[1].faults["/init_communicator/"].append(slow(5))
    it.sync(1)


SCENES = (
    in_turn, lost_by_one, all_lost, none_comes_back, another_model, unreadable, one_bad_request, faults_in_sync,
    no_weight_group,
)  # fmt: skip


def play(scene, rank, folder):
    changes = {"timeout_s": 1.5} if scene in (none_comes_back, no_weight_group) else {}
    it = Run(folder, **changes) if rank == 0 else None
    addresses = json.dumps([[one.url, one.group_port] for one in it.servers]) if it else ""
    at = json.loads(gather_texts(addresses)[0])
    it = it or Run(folder, at=at, **changes)
    since = time.perf_counter()
    try:
        found = {"gave": scene(rank, it)}
    except Exception as error:  # noqa: BLE001
        found = {"raised": type(error).__name__, "text": str(error)}
    found["seconds"] = time.perf_counter() - since
    found["in step"] = sum_over_ranks([7.0]) == [14.0]
    it.close()
    return found


def main(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    (folder / str(rank)).mkdir()
    report = {}
    for scene in SCENES:
        report[scene.__name__] = play(scene, rank, folder / str(rank))
        (folder / f"rank-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
