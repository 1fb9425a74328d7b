"""One of three learner ranks: `python ranks_worker.py RANK FOLDER`. Writes the outcome of each scene.

The fake servers are threads of rank 0. With two senders, rank 0 sends to servers 0 and 2, rank 1 to 1 and 3.
The weights of the ranks differ, which shows who sent them. Every weight is gathered by a collective, as with FSDP.
After every scene all ranks add up a number. If one rank still waits in a call that another has left, the sum shows
it.
"""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from coordexp.ranks import gather_texts, sum_over_ranks, together
from coordexp.servers import backend as server_backend
from coordexp.servers import sender as server_weights
from tests.fake_server import changed, dies, garbage, slow
from tests.unit.servers.served import Run, are_right

server_backend.AGAIN = 0.05
server_weights.BUCKET_BYTES = 700
RANKS = 3


def weights_of(rank):
    return {f"w{k}": torch.full((9, 7 + k), 10.0 * k + rank) for k in range(12)}


class Learner(Run):
    """One rank's learner. `weights` are its own."""

    def sync(self, version):
        self.backend.sync(self.gather_weights, version)

    def gather_weights(self):
        for name, weight in self.weights.items():
            assert sum_over_ranks([1.0]) == [float(RANKS)]
            yield name, weight

    def senders(self):
        """Return the rank whose weights each server has. Only rank 0 has the servers."""
        return [int(server.weights["w0"].max()) if server.weights else None for server in self.servers]

    def answers(self, version):
        """Generate, with another number of requests on each rank."""
        rank = self.backend.rank
        return are_right(self.generate(3 + rank, 100 * rank), version, 100 * rank)


def on_first_rank(rank, work):
    """Do something to the servers while no rank uses them."""
    together(lambda: work() if rank == 0 else None)


def in_turn(rank, learner):
    correct = []
    for version in (1, 2, 2, 3):
        learner.sync(version)
        correct.append(learner.answers(version))
    whole = [weights_of(sender) for sender in learner.senders()] if rank == 0 else []
    return {
        "right": correct,
        "links": sorted(learner.backend.sender.open),
        "senders": learner.senders() if rank == 0 else None,
        "whole": all(
            torch.equal(server.weights[name], weight)
            for server, weights in zip(learner.servers, whole, strict=False)
            for name, weight in weights.items()
        ),
        "begun": [server.paths().count("/begin_update/") for server in learner.servers] if rank == 0 else None,
        "recorded": [event["event"] for event in learner.events],
        "syncs": [event for event in learner.events if event["event"] == "sync"],
        "bytes": sum(weight.nbytes for weight in learner.weights.values()),
        "run": learner.backend.asker.run,
    }


def lost_in_a_share(rank, learner):
    """A server of rank 1 dies while all ranks ask it, and comes back."""
    learner.sync(1)
    on_first_rank(rank, lambda: learner.servers[3].faults["/infer/"].append(dies))
    correct, usable = [learner.answers(1)], [learner.backend.pool.usable]
    on_first_rank(rank, learner.servers[3].restart if rank == 0 else None)
    learner.sync(2)
    return {
        "right": [*correct, learner.answers(2)],
        "usable": [*usable, learner.backend.pool.usable],
        "senders": learner.senders() if rank == 0 else None,
        "messages": learner.messages,
    }


def share_of_another_rank_lost(rank, learner):
    """All servers of rank 1 are gone, and come back later."""
    lost = (1, 3)
    learner.sync(1)
    on_first_rank(rank, lambda: [learner.servers[k].die() for k in lost])
    time.sleep(0.3)  # the connections close
    learner.sync(2)
    correct, usable = [learner.answers(2)], [learner.backend.pool.usable]
    on_first_rank(rank, lambda: [learner.servers[k].restart() for k in lost])
    learner.sync(3)
    return {
        "right": [*correct, learner.answers(3)],
        "usable": [*usable, learner.backend.pool.usable],
        "senders": learner.senders() if rank == 0 else None,
        "messages": learner.messages,
    }


def none_comes_back(rank, learner):
    learner.sync(1)
    on_first_rank(rank, lambda: [server.die() for server in learner.servers])
    learner.generate(2)


def another_model(rank, learner):
    on_first_rank(rank, lambda: setattr(learner.servers[1], "facts", learner.servers[1].facts | {"model": {}}))
    learner.sync(1)


def unreadable(rank, learner):
    """The first responses cannot be read. Whichever rank gets them, all ranks end."""
    learner.sync(1)
    on_first_rank(rank, lambda: [server.faults["/infer/"].extend([garbage()] * 4) for server in learner.servers])
    learner.generate(1)


def one_bad_request(rank, learner):
    learner.sync(1)
    error = {"error": {"code": "bad_request", "message": "no such image", "fix": "copy it"}}
    fault = changed(lambda items: [error] * len(items))
    on_first_rank(rank, lambda: [server.faults["/infer/"].append(fault) for server in learner.servers])
    learner.generate(1 if rank == 0 else 0)


def no_weight_group(rank, learner):
    """The group port of one server never opens."""
    on_first_rank(rank, lambda: learner.servers[1].faults["/init_communicator/"].append(slow(5)))
    learner.sync(1)


SHARES = {"servers": 4, "sync": {"senders": 2}}
SCENES = {
    "in_turn": (in_turn, {}),
    "in_shares": (in_turn, SHARES),
    "lost_in_a_share": (lost_in_a_share, SHARES),
    "share_of_another_rank_lost": (share_of_another_rank_lost, SHARES),
    "none_comes_back": (none_comes_back, {"timeout_s": 1.5}),
    "another_model": (another_model, SHARES),
    "unreadable": (unreadable, {}),
    "one_bad_request": (one_bad_request, {}),
    "no_weight_group": (no_weight_group, {"timeout_s": 1.5}),
}


def play(name, rank, folder):
    scene, changes = SCENES[name]
    changes = {"decode_batch_size": 8} | changes
    learner = Learner(folder, **changes) if rank == 0 else None
    own = json.dumps([[server.url, server.group_port] for server in learner.servers]) if learner else ""
    addresses = json.loads(gather_texts(own)[0])
    learner = learner or Learner(folder, addresses=addresses, **changes)
    learner.weights = weights_of(rank)
    since = time.perf_counter()
    try:
        outcome = {"result": scene(rank, learner)}
    except Exception as error:  # noqa: BLE001
        outcome = {"raised": type(error).__name__, "text": str(error)}
    outcome["seconds"] = time.perf_counter() - since
    outcome["in step"] = sum_over_ranks([7.0]) == [7.0 * RANKS]
    learner.close()
    return outcome


def main(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=30)
    )
    (folder / str(rank)).mkdir()
    report = {name: play(name, rank, folder / str(rank)) for name in SCENES}
    (folder / f"rank-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
