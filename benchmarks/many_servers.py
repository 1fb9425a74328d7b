"""Measure what many servers cost a learner: `python benchmarks/many_servers.py [--servers 64] [--ranks 16]
[--senders 1]`.

The ranks are real processes with the learner's own backend. The servers are fakes with real HTTP and a real gloo
group each, all in one process, which answer at once and have no model. So the figures are the costs of the learner
alone: processor time per request, and processor and wall time of a sync of 2 MB of weights.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from coordexp.servers.pool import sending_rank

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
STEPS = 6


def serve(folder: Path, count: int) -> None:
    """Run the fakes until standard input closes. Write their addresses to a file."""
    from tests.fake_server import FakeRolloutServer
    from tests.rollouts import PROMPT
    from tests.unit.servers.served import TABLE

    from coordexp.config.rollout import RepeatTerminate
    from coordexp.servers.protocol import model_fingerprint

    (folder / "config.json").write_text(json.dumps({"hidden": 8, "dtype": "float32"}))
    guard = RepeatTerminate().model_dump(mode="json")
    facts = {"model": model_fingerprint(folder), "dtype": "float32", "guard": guard}
    servers = [FakeRolloutServer(facts, end_of_turn=TABLE.end_of_turn, prompt_ids=PROMPT) for _ in range(count)]
    addresses = [(server.url, server.group_port) for server in servers]
    (folder / "addresses.partial").write_text(json.dumps(addresses))
    (folder / "addresses.partial").rename(folder / "addresses.json")
    sys.stdin.read()


def learn(folder: Path, rank: int, ranks: int, senders: int, requests_per_server: int) -> None:
    """Run one rank: syncs and rollouts in turn. Write what they cost."""
    import torch
    from tests.unit.servers import served
    from tests.unit.servers.served import Run, are_right, requests
    from torch import distributed as dist

    from coordexp.servers.client import ClientTimeouts

    # All processes share a few cores, so everything takes longer than on a cluster.
    served.TIMEOUTS = ClientTimeouts(poll=1, health=60, silence=120, call=120)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    addresses = [tuple(address) for address in json.loads((folder / "addresses.json").read_text())]
    own = folder / str(rank)
    own.mkdir()
    limits = {"decode_batch_size": 32, "timeout_s": 200, "sync_timeout_s": 200}
    run = Run(own, addresses=addresses, sync={"senders": senders}, **limits)
    (own / "config.json").write_text((folder / "config.json").read_text())
    run.weights = {f"w{k}": torch.full((64, 1024), float(k)) for k in range(8)}
    count = len(addresses) * requests_per_server // ranks
    costs: dict[str, list[float]] = {"sync cpu": [], "sync wall": [], "request cpu": [], "rollout wall": []}
    for step in range(STEPS):
        wall, cpu = time.perf_counter(), time.process_time()
        run.sync(step)
        costs["sync wall"].append(time.perf_counter() - wall)
        costs["sync cpu"].append(time.process_time() - cpu)
        wall, cpu = time.perf_counter(), time.process_time()
        rollouts = run.backend.generate(requests(count, first=1000 * rank))
        costs["rollout wall"].append(time.perf_counter() - wall)
        costs["request cpu"].append((time.process_time() - cpu) / count)
        assert are_right(rollouts, step, first=1000 * rank)
    (folder / f"rank-{rank}.json").write_text(json.dumps(costs))
    run.close()


def start(part: str, folder: Path, *words: Any, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--part", part, "--folder", str(folder), *map(str, words)]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--senders", type=int, default=1, help="ranks that send weights")
    parser.add_argument("--requests", type=int, default=32, help="per server and step")
    for hidden in ("--part", "--folder", "--rank"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "serve":
        serve(Path(options.folder), options.servers)
    elif options.part == "learn":
        learn(Path(options.folder), int(options.rank), options.ranks, options.senders, options.requests)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    sizes = ("--servers", options.servers, "--ranks", options.ranks, "--senders", options.senders)
    sizes += ("--requests", options.requests)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        server = start("serve", folder, *sizes, stdin=subprocess.PIPE)
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            while not (folder / "addresses.json").is_file():
                assert server.poll() is None, "the fakes did not start"
                time.sleep(0.2)
            print(f"{options.ranks} ranks connect to {options.servers} servers", file=sys.stderr)
            ranks = [start("learn", folder, *sizes, "--rank", rank) for rank in range(options.ranks)]
            assert all(rank.wait(1200) == 0 for rank in ranks), "a rank failed"
            costs = [json.loads((folder / f"rank-{k}.json").read_text()) for k in range(options.ranks)]
        finally:
            for process in (server, *ranks):
                process.kill()
    sending = {sending_rank(k, options.senders, options.ranks) for k in range(options.servers)}
    show(costs, sending)


def show(costs: list[dict[str, list[float]]], sending: set[int]) -> None:
    """Print medians over the steps after the first, which connects."""
    senders = [cost for rank, cost in enumerate(costs) if rank in sending]
    others = [cost for rank, cost in enumerate(costs) if rank not in sending] or costs

    def median(name: str, of: list[dict[str, list[float]]]) -> float:
        return statistics.median(value for cost in of for value in cost[name][1:])

    print(f"processor time of a learner per request     {1000 * median('request cpu', costs):8.2f} ms")
    print(f"rollouts of a step, wall time               {median('rollout wall', costs):8.2f} s")
    print(f"sync, wall time                             {median('sync wall', costs):8.2f} s")
    print(f"sync, processor time of a rank that sends   {median('sync cpu', senders):8.2f} s")
    print(f"sync, processor time of every other rank    {median('sync cpu', others):8.3f} s")


if __name__ == "__main__":
    main()
