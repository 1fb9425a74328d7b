"""One of three learner ranks, of which the first two send weights: `python senders_worker.py RANK FOLDER`. Writes
the outcome of each scene.

The four fake servers are threads of rank 0. Rank 0 sends to servers 0 and 2, rank 1 to servers 1 and 3. The
weights of the ranks differ, which shows who sent them. Every weight is gathered by a collective, as with FSDP.
"""

import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from coordexp.ranks import gather_texts, sum_over_ranks, together
from coordexp.servers import backend as server_backend
from coordexp.servers import links as server_links
from coordexp.servers import send as server_weights
from tests.fake_server import dies, slow
from tests.unit.servers.served import Run, are_right

server_backend.AGAIN = 0.05
server_links.NOTIFY_EVERY = 0.2
server_weights.BUCKET_BYTES = 700
RANKS = 3
SLOW_SYNC_S = 4.0


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
        first = 100 * self.backend.rank
        return are_right(self.generate(4, first), version, first)


def on_first_rank(rank, work):
    """Do something to the servers while no rank uses them."""
    together(lambda: work() if rank == 0 else None)


def wait_until(condition):
    end = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def shares(rank, learner):
    correct = []
    for version in (1, 2, 2, 3):
        learner.sync(version)
        correct.append(learner.answers(version))
    has_all = rank or all(
        torch.equal(server.weights[name], weight)
        for k, server in enumerate(learner.servers)
        for name, weight in weights_of(k % 2).items()
    )
    return {
        "right": correct,
        "links": sorted(learner.backend.links.open),
        "senders": learner.senders() if rank == 0 else None,
        "whole": bool(has_all),
        "starts": [server.paths().count("/begin_update/") for server in learner.servers] if rank == 0 else None,
        "events": [event for event in learner.events if event["event"] == "sync"],
        "bytes": sum(weight.nbytes for weight in learner.weights.values()),
        "run": learner.backend._run,
    }


def lost_in_a_share(rank, learner):
    """A server of rank 1 dies while all ranks ask it, and comes back."""
    learner.sync(1)
    on_first_rank(rank, lambda: learner.servers[3].faults["/infer/"].append(dies))
    correct = [learner.answers(1)]
    usable = [learner.backend.pool.usable]
    on_first_rank(rank, learner.servers[3].restart if rank == 0 else None)
    learner.sync(2)
    correct.append(learner.answers(2))
    usable.append(learner.backend.pool.usable)
    return {
        "right": correct,
        "usable": usable,
        "senders": learner.senders() if rank == 0 else None,
        "messages": learner.messages,
    }


def restarted(rank, learner):
    """A server of rank 1 was restarted between two steps. It gets the weights of the next one."""
    learner.sync(1)
    on_first_rank(rank, learner.servers[3].restart if rank == 0 else None)
    if rank == 1:
        wait_until(lambda: not learner.backend.links.open[3].is_alive)
    together(lambda: None)
    learner.sync(2)
    return {
        "right": [learner.answers(2)],
        "usable": [learner.backend.pool.usable],
        "links": sorted(learner.backend.links.open),
        "senders": learner.senders() if rank == 0 else None,
        "events": [event for event in learner.events if event["event"] == "sync"],
    }


def lost_in_a_sync(rank, learner):
    learner.sync(1)
    on_first_rank(rank, lambda: learner.servers[1].faults["/load_bucket/"].append(dies))
    learner.sync(2)
    return {
        "right": [learner.answers(2)],
        "usable": [learner.backend.pool.usable],
        "links": sorted(learner.backend.links.open),
        "messages": learner.messages,
        "events": [event for event in learner.events if event["event"] == "sync"],
    }


def share_of_another_rank_lost(rank, learner):
    """All servers of rank 1 are gone, and come back later."""
    lost = (1, 3)
    learner.sync(1)
    on_first_rank(rank, lambda: [learner.servers[k].die() for k in lost])
    time.sleep(0.3)  # the connections close
    learner.sync(2)
    correct = [learner.answers(2)]
    usable = [learner.backend.pool.usable]
    on_first_rank(rank, lambda: [learner.servers[k].restart() for k in lost])
    learner.sync(3)
    correct.append(learner.answers(3))
    usable.append(learner.backend.pool.usable)
    return {
        "right": correct,
        "usable": usable,
        "senders": learner.senders() if rank == 0 else None,
        "messages": learner.messages,
    }


def all_lost(rank, learner):
    """All servers die. One of rank 1 comes back while all ranks wait, and rank 2 has no requests."""
    learner.sync(1)

    def kill():
        for server in learner.servers:
            server.die()
        threading.Timer(0.6, learner.servers[3].restart).start()

    on_first_rank(rank, kill)
    count = 0 if rank == 2 else 4
    correct = are_right(learner.generate(count), 1)
    return {"right": [correct], "usable": [learner.backend.pool.usable]}


def another_model(rank, learner):
    on_first_rank(rank, lambda: setattr(learner.servers[1], "facts", learner.servers[1].facts | {"model": {}}))
    learner.sync(1)


def too_few_slots(rank, learner):
    learner.sync(1)


def returns_with_another_dtype(rank, learner):
    learner.sync(1)

    def restart():
        learner.servers[1].facts = learner.servers[1].facts | {"dtype": "float16"}
        learner.servers[1].restart()

    on_first_rank(rank, restart)
    for version in (2, 3):
        learner.sync(version)
    return {"usable": [learner.backend.pool.usable], "messages": learner.messages}


def late_server(rank, learner):
    """A server of rank 1 is not there at the start. It starts when rank 1 has said that it waits for it."""
    waits = learner.folder.parent / "waits"

    def start_late():
        wait_until(waits.exists)
        learner.servers[1].restart()

    on_first_rank(rank, lambda: learner.servers[1].die())
    if rank == 0:
        threading.Thread(target=start_late, daemon=True).start()
    if rank == 1:
        notify = learner.backend.links.notify

        def notify_and_note(message):
            notify(message)
            waits.touch()

        learner.backend.links.notify = notify_and_note
    learner.sync(1)
    return {"usable": [learner.backend.pool.usable], "messages": learner.messages}


def slow_alone(rank, learner):
    """The only server of rank 1 is alive and loads no weights. Rank 0 cannot gather without rank 1."""
    learner.sync(1)
    on_first_rank(rank, lambda: learner.servers[1].faults["/load_bucket/"].append(slow(6)))
    learner.sync(2)
    return {"right": [learner.answers(2)], "usable": [learner.backend.pool.usable]}


SCENES = {
    shares: {},
    lost_in_a_share: {},
    restarted: {},
    lost_in_a_sync: {},
    share_of_another_rank_lost: {},
    all_lost: {},
    another_model: {},
    too_few_slots: {"servers": 2, "decode_batch_size": 1},
    returns_with_another_dtype: {},
    late_server: {},
    slow_alone: {"servers": 2, "sync_timeout_s": SLOW_SYNC_S},
}


def play(scene, rank, folder):
    changes = {"servers": 4, "sync": {"senders": 2}} | SCENES[scene]
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
    report = {}
    for scene in SCENES:
        report[scene.__name__] = play(scene, rank, folder / str(rank))
        (folder / f"rank-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
