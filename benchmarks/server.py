"""What rollout servers cost against the bare parts underneath, on this machine.

python benchmarks/server.py            a table
python benchmarks/server.py --json     {name: {"value": x, "goal": y, "ok": true}}

A real `coordexp serve` and the learner's own client. Ratios within one run, medians of calls made in turn:
- tokens a second of served rollouts, against `LLM.generate` of a bare engine with the same settings, with the
  pictures in memory. Caches are emptied before each.
- what a request costs besides its time within the server's handler: its share of the client, HTTP and JSON.
- bytes a second of a sync (from the learner's weights to a version that is committed and read back), against a
  gloo broadcast of the same tensors to another process that does nothing with them; on a model of 460 MB, and on
  the demo's of 2 MB, where it is a matter of calls.
- how long health takes to be told during answers and during syncs.
"""

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from bare import Bare, Learning, bare_engine, drawn_pictures, written
from ratios import Results, at_least, at_most, main, medians, shown
from rich.progress import Progress

from coordexp.config import load_settings
from coordexp.demo.model import Size, make_model
from coordexp.rollout.backend import Decode, Picture, Request
from coordexp.rollout.broadcast import join
from coordexp.rollout.engine import stop_engine
from coordexp.rollout.server_backend import ServerBackend
from coordexp.rollout.setup import Setup

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples/stage2-cpu/model"
LARGE = Size(hidden=1024, layers=12, heads=8)
REQUESTS, TOKENS = 32, 200


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def config(folder: Path, model: Path, name: str) -> Path:
    drawn = {f"{part}_jsonl": str(folder / f"data/{part}.jsonl") for part in ("train", "val")}
    server = {"base_url": f"http://127.0.0.1:{free_port()}", "group_port": free_port()}
    vllm = {
        "mode": "server",
        "gpu_memory_utilization": 0.15,
        "max_model_len": 512,
        "server": {"servers": [server]},
    }
    tree = {
        "extends": [os.path.relpath(ROOT / "configs/demo/stage2-vllm.yaml", folder)],
        "model": {"path": str(model)},
        "custom": {"trainer_variant": "stage2_rollout_aligned", **drawn},
        "stage2": None,
        "rollout_matching": {"decode_batch_size": REQUESTS, "max_new_tokens": TOKENS, "vllm": vllm},
        "training": {"output_dir": str(folder / name), "eval_strategy": "no"},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@contextmanager
def server(file: Path) -> Iterator[str]:
    """A `coordexp serve` that is ready; its address."""
    (one,) = load_settings(file).settings.rollout_matching.vllm.server.servers
    words = ["-m", "coordexp", "serve", "--config", str(file)]
    process = subprocess.Popen([sys.executable, *words], start_new_session=True)
    try:
        while True:
            assert process.poll() is None, "the server did not start"
            try:
                httpx.get(f"{one.base_url}/health/", trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.5)
        yield one.base_url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


class Served(Learning):
    """A learner, by its backend, with the server of a config."""

    def __init__(self, file: Path, url: str, pictures: list[Picture]) -> None:
        settings = load_settings(file).settings
        folder = Path(settings.model.path)
        super().__init__(folder)
        self.url, self.folder = url, folder
        about = Setup(folder, "float32", settings.rollout_matching, self.table, torch.device("cpu"))
        self.backend = ServerBackend(about, self.prompts, self.own, pictures[0])
        self.version = 0
        self.sync()

    def sync(self) -> None:
        self.version += 1
        self.backend.sync(self.weights, self.version)

    def handled(self) -> float:
        """Seconds that the server has spent in calls."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        return float(re.findall(r"^coordexp_infer_seconds_sum (\S+)$", text, re.MULTILINE)[0])


def generation(served: Served, pictures: list[Picture]) -> Results:
    """Greedy answers have the same tokens both ways, so the ratio of times is that of tokens a second."""
    bare = Bare(
        bare_engine(served.folder, REQUESTS, 512, 0.15), served.prompts, served.table.end_of_turn, pictures, TOKENS
    )
    requests = [Request(picture, Decode.greedy(TOKENS)) for picture in pictures]
    tokens, beside = [0], []

    def ours() -> None:
        before, since = served.handled(), time.perf_counter()
        found = served.backend.generate(requests)
        whole = time.perf_counter() - since
        beside.append((whole - (served.handled() - before)) / len(requests))
        tokens[0] = written(found)

    def forget() -> None:
        bare.forget()
        served.sync()  # by which the server forgets too

    times = medians({"bare": bare.generate, "ours": ours}, before=forget)
    stop_engine(bare.engine.llm_engine.engine_core)
    assert bare.tokens == tokens[0], (bare.tokens, tokens)
    return {
        "tokens a second, served / bare LLM.generate": at_least(times["bare"] / times["ours"], 0.93),
        "tokens a second, served": shown(tokens[0] / times["ours"]),
        "milliseconds a request, beside the server's handler": at_most(1000 * statistics.median(beside[1:]), 2),
    }


def receive(port: int, shapes: list[tuple[list[int], str]]) -> None:
    """The other end of a bare broadcast, until it is ended."""
    group = join("127.0.0.1", port, 0, 2, torch.device("cpu"), 600.0)
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in shapes]
    while True:
        for tensor in tensors:
            group.broadcast(tensor)


def sending(served: Served, name: str, goal: float | None) -> Results:
    weights = [weight for _, weight in served.weights()]
    shapes = [(list(weight.shape), str(weight.dtype).removeprefix("torch.")) for weight in weights]
    port = free_port()
    code = f"import json, server; server.receive({port}, json.loads({json.dumps(json.dumps(shapes))}))"
    other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT / "benchmarks", stderr=subprocess.DEVNULL)
    group = join("127.0.0.1", port, 1, 2, torch.device("cpu"), 600.0)

    def broadcast() -> None:
        for weight in weights:
            group.broadcast(weight)

    times = medians({"broadcast": broadcast, "sync": served.sync})
    other.kill()
    other.wait()
    group.close()
    size = sum(weight.nbytes for weight in weights)
    ratio = times["broadcast"] / times["sync"]
    return {
        f"bytes a second of a sync / gloo broadcast, {name}": shown(ratio)
        if goal is None
        else at_least(ratio, goal),
        f"megabytes a second of a sync, {name}": shown(size / times["sync"] / 1e6),
        f"megabytes a second of the broadcast, {name}": shown(size / times["broadcast"] / 1e6),
    }


def health(url: str, what: str, work: Callable[[], Any]) -> Results:
    taken: list[float] = []
    ended = threading.Event()

    def look() -> None:
        with httpx.Client(base_url=url, trust_env=False) as http:
            while not ended.wait(0.01):
                since = time.perf_counter()
                assert http.get("/health/").status_code == 200
                taken.append(1000 * (time.perf_counter() - since))

    watcher = threading.Thread(target=look)
    watcher.start()
    for _ in range(3):
        work()
    ended.set()
    watcher.join()
    return {
        f"health during {what}, milliseconds, median": shown(statistics.median(taken)),
        f"health during {what}, milliseconds, 99 of 100": at_most(statistics.quantiles(taken, n=100)[-1], 100),
    }


def measure(progress: Progress) -> Results:
    task = progress.add_task("a server", total=4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pictures = drawn_pictures(folder / "data", REQUESTS)
        requests = [Request(picture, Decode.greedy(TOKENS)) for picture in pictures]
        file = config(folder, DEMO, "small")
        with server(file) as url:
            served = Served(file, url, pictures)
            progress.update(task, advance=1, description="generation")
            results = health(url, "answers", partial(served.backend.generate, requests))
            results |= generation(served, pictures)
            results |= sending(served, "2 MB", None)
            served.backend.close()
        progress.update(task, advance=1, description="a large model")
        file = config(folder, make_model(folder / "large", "small", size=LARGE), "large")
        with server(file) as url:
            served = Served(file, url, pictures)
            progress.update(task, advance=1, description="sync")
            results |= sending(served, "460 MB", 0.8)
            results |= health(url, "syncs", served.sync)
            served.backend.close()
        progress.update(task, advance=1)
    return results


if __name__ == "__main__":
    main(__doc__, measure, "--part", {})
