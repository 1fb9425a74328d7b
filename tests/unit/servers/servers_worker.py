"""One of two learner ranks: `python servers_worker.py RANK FOLDER`. Writes the outcome of each scene.

The fake servers are threads of rank 0. After every scene both ranks add up a number. If one rank still waits in a
call that the other has left, the sum shows it.
"""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch import distributed as dist

from coordexp.ranks import gather_texts, sum_over_ranks, together
from coordexp.servers import backend as server_backend
from tests.fake_server import changed, garbage, slow
from tests.unit.servers.served import Run, are_right

server_backend.AGAIN = 0.05


def in_turn(rank, learner):
    """Sync and generate in turn, with another number of requests on each rank."""
    correct = []
    for version in (1, 2, 2, 3):
        learner.sync(version)
        count = 5 if rank else 3
        correct.append(are_right(learner.generate(count, 100 * rank), version, 100 * rank))
    starts = [server.paths().count("/begin_update/") for server in learner.servers] if rank == 0 else None
    return {
        "right": correct,
        "starts": starts,
        "links": sorted(learner.backend.links.open),
        "recorded": [event["event"] for event in learner.events],
    }


def none_comes_back(rank, learner):
    learner.sync(1)
    if rank == 0:
        for server in learner.servers:
            server.die()
    learner.generate(2)


def another_model(rank, learner):
    if rank == 0:
        learner.servers[1].facts = learner.servers[1].facts | {"model": {}}
    learner.sync(1)


def unreadable(rank, learner):
    """The first responses cannot be read. Whichever rank gets them, both ranks end."""
    learner.sync(1)
    if rank == 0:
        for server in learner.servers:
            server.faults["/infer/"] += [garbage(), garbage(), garbage(), garbage()]
    together(lambda: None)
    learner.generate(1)


def one_bad_request(rank, learner):
    learner.sync(1)
    if rank == 0:
        error = {"error": {"code": "bad_request", "message": "no such image", "fix": "copy it"}}
        for server in learner.servers:
            server.faults["/infer/"].append(changed(lambda items: [error] * len(items)))
    together(lambda: None)
    learner.generate(1 if rank == 0 else 0)


def no_weight_group(rank, learner):
    """The group port of one server never opens."""
    if rank == 0:
        learner.servers[1].faults["/init_communicator/"].append(slow(5))
    learner.sync(1)


SCENES = (in_turn, none_comes_back, another_model, unreadable, one_bad_request, no_weight_group)


def play(scene, rank, folder):
    changes = {"timeout_s": 1.5} if scene in (none_comes_back, no_weight_group) else {}
    learner = Run(folder, **changes) if rank == 0 else None
    own = json.dumps([[server.url, server.group_port] for server in learner.servers]) if learner else ""
    addresses = json.loads(gather_texts(own)[0])
    learner = learner or Run(folder, addresses=addresses, **changes)
    since = time.perf_counter()
    try:
        outcome = {"result": scene(rank, learner)}
    except Exception as error:  # noqa: BLE001
        outcome = {"raised": type(error).__name__, "text": str(error)}
    outcome["seconds"] = time.perf_counter() - since
    outcome["in step"] = sum_over_ranks([7.0]) == [14.0]
    learner.close()
    return outcome


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
