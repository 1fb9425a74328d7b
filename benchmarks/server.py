"""Compare rollout servers with the bare parts that they are built on, on this machine.

python benchmarks/server.py            a table
python benchmarks/server.py --json     {name: {"value": x, "goal": y, "ok": true}}

The benchmark starts a real `coordexp serve` and uses the client of the learner. The figures are ratios within
one run, of the medians of calls that take turns:

- tokens per second of served rollouts, compared with `LLM.generate` of a bare engine with the same settings and
  the images in memory. Caches are emptied before each call.
- the time of a request outside the server's handler: its share of the client, HTTP and JSON.
- bytes per second of a sync (from the learner's weights to a version that is committed and read back), compared
  with a gloo broadcast of the same tensors to a process that discards them. Measured on a model of 460 MB, and on
  the demo model of 2 MB, where the cost of calls dominates.
- the response time of the health route during generation and during syncs.
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
from bare import BareGeneration, BenchmarkLearner, count_tokens, draw_images, start_bare_engine
from ratios import Results, at_least, at_most, main, medians, without_goal
from rich.progress import Progress

from coordexp.config import load_settings
from coordexp.demo.model import Size, make_model
from coordexp.rollout.backend import Decode, ImageRef, Request
from coordexp.rollout.prompt import read_image_size
from coordexp.rollout.start import EngineSetup
from coordexp.servers.backend import ServerBackend
from coordexp.servers.processes import stop_engine
from coordexp.servers.transfer import join

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples/stage2-cpu/model"
LARGE = Size(hidden=1024, layers=12, heads=8)
REQUESTS, TOKENS = 32, 200


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def describe_server() -> dict[str, Any]:
    """Return the section `rollout_matching.vllm` of a run with one server, on free ports."""
    server = {"base_url": f"http://127.0.0.1:{find_free_port()}", "group_port": find_free_port()}
    return {
        "mode": "server",
        "gpu_memory_utilization": 0.15,
        "max_model_len": 512,
        "server": {"servers": [server]},
    }


def write_config(folder: Path, model: Path, name: str) -> Path:
    data = {f"{part}_jsonl": str(folder / f"data/{part}.jsonl") for part in ("train", "val")}
    vllm = describe_server()
    tree = {
        "extends": [os.path.relpath(ROOT / "configs/demo/stage2-vllm.yaml", folder)],
        "model": {"path": str(model)},
        "custom": {"trainer_variant": "stage2_rollout_aligned", **data},
        "stage2": None,
        "rollout_matching": {"decode_batch_size": REQUESTS, "max_new_tokens": TOKENS, "vllm": vllm},
        "training": {"output_dir": str(folder / name), "eval_strategy": "no"},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@contextmanager
def serve(file: Path) -> Iterator[str]:
    """Run `coordexp serve`, and yield its address once it is ready."""
    (server,) = load_settings(file).settings.rollout_matching.vllm.server.servers
    command = [sys.executable, "-m", "coordexp", "serve", "--config", str(file)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        while True:
            assert process.poll() is None, "the server did not start"
            try:
                httpx.get(f"{server.base_url}/health/", trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.5)
        yield server.base_url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


class ServedLearner(BenchmarkLearner):
    """A learner that uses the rollout server of a config."""

    def __init__(self, file: Path, url: str, images: list[ImageRef]) -> None:
        settings = load_settings(file).settings
        folder = Path(settings.model.path)
        super().__init__(folder)
        self.url, self.folder = url, folder
        size = read_image_size(self.prompts.processor)
        setup = EngineSetup(
            folder, "float32", settings.rollout_matching, self.table, torch.device("cpu"), image_size=size
        )
        self.backend = ServerBackend(setup, self.prompts, self.own, images[:1])
        self.version = 0
        self.sync()

    def sync(self) -> None:
        self.version += 1
        self.backend.sync(self.weights, self.version)

    def handler_seconds(self) -> float:
        """Return the seconds that the server has spent in its handler so far."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False).text
        return float(re.findall(r"^coordexp_infer_seconds_sum (\S+)$", text, re.MULTILINE)[0])


def measure_generation(learner: ServedLearner, images: list[ImageRef]) -> Results:
    """Greedy answers have the same tokens in both cases, so the ratio of times is the ratio of tokens per
    second."""
    engine = start_bare_engine(learner.folder, REQUESTS, 512, 0.15)
    bare = BareGeneration(engine, learner.prompts, learner.table.end_of_turn, images, TOKENS)
    requests = [Request(image, Decode.greedy(TOKENS)) for image in images]
    tokens, outside_handler = [0], []

    def ours() -> None:
        handler_before, began = learner.handler_seconds(), time.perf_counter()
        rollouts = learner.backend.generate(requests)
        seconds = time.perf_counter() - began
        in_handler = learner.handler_seconds() - handler_before
        outside_handler.append((seconds - in_handler) / len(requests))
        tokens[0] = count_tokens(rollouts)

    def reset_caches() -> None:
        bare.reset_caches()
        learner.sync()  # a sync also empties the caches of the server

    times = medians({"bare": bare.generate, "ours": ours}, before=reset_caches)
    stop_engine(engine.llm_engine.engine_core)
    assert bare.tokens == tokens[0], (bare.tokens, tokens)
    return {
        "tokens a second, served / bare LLM.generate": at_least(times["bare"] / times["ours"], 0.93),
        "tokens a second, served": without_goal(tokens[0] / times["ours"]),
        "milliseconds a request, beside the server's handler": at_most(
            1000 * statistics.median(outside_handler[1:]), 2
        ),
    }


def receive(port: int, shapes: list[tuple[list[int], str]]) -> None:
    """Receive a bare broadcast again and again, until the process is ended."""
    group = join("127.0.0.1", port, 0, 2, torch.device("cpu"), 600.0)
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in shapes]
    while True:
        for tensor in tensors:
            group.broadcast(tensor)


def measure_sync(learner: ServedLearner, name: str, goal: float | None) -> Results:
    weights = [weight for _, weight in learner.weights()]
    shapes = [(list(weight.shape), str(weight.dtype).removeprefix("torch.")) for weight in weights]
    port = find_free_port()
    code = f"import json, server; server.receive({port}, json.loads({json.dumps(json.dumps(shapes))}))"
    receiver = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT / "benchmarks", stderr=subprocess.DEVNULL)
    group = join("127.0.0.1", port, 1, 2, torch.device("cpu"), 600.0)

    def broadcast() -> None:
        for weight in weights:
            group.broadcast(weight)

    times = medians({"broadcast": broadcast, "sync": learner.sync})
    receiver.kill()
    receiver.wait()
    group.close()
    size = sum(weight.nbytes for weight in weights)
    ratio = times["broadcast"] / times["sync"]
    return {
        f"bytes a second of a sync / gloo broadcast, {name}": without_goal(ratio)
        if goal is None
        else at_least(ratio, goal),
        f"megabytes a second of a sync, {name}": without_goal(size / times["sync"] / 1e6),
        f"megabytes a second of the broadcast, {name}": without_goal(size / times["broadcast"] / 1e6),
    }


def measure_health(url: str, what: str, work: Callable[[], Any]) -> Results:
    """Return the response times of the health route while the server does some work."""
    milliseconds: list[float] = []
    ended = threading.Event()

    def poll() -> None:
        with httpx.Client(base_url=url, trust_env=False) as http:
            while not ended.wait(0.01):
                began = time.perf_counter()
                assert http.get("/health/").status_code == 200
                milliseconds.append(1000 * (time.perf_counter() - began))

    watcher = threading.Thread(target=poll)
    watcher.start()
    for _ in range(3):
        work()
    ended.set()
    watcher.join()
    return {
        f"health during {what}, milliseconds, median": without_goal(statistics.median(milliseconds)),
        f"health during {what}, milliseconds, 99 of 100": at_most(
            statistics.quantiles(milliseconds, n=100)[-1], 100
        ),
    }


def measure(progress: Progress) -> Results:
    task = progress.add_task("a server", total=4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = draw_images(folder / "data", REQUESTS)
        requests = [Request(image, Decode.greedy(TOKENS)) for image in images]
        file = write_config(folder, DEMO, "small")
        with serve(file) as url:
            learner = ServedLearner(file, url, images)
            progress.update(task, advance=1, description="generation")
            results = measure_health(url, "answers", partial(learner.backend.generate, requests))
            results |= measure_generation(learner, images)
            results |= measure_sync(learner, "2 MB", None)
            learner.backend.close()
        progress.update(task, advance=1, description="a large model")
        file = write_config(folder, make_model(folder / "large", "small", size=LARGE), "large")
        with serve(file) as url:
            learner = ServedLearner(file, url, images)
            progress.update(task, advance=1, description="sync")
            results |= measure_sync(learner, "460 MB", 0.8)
            results |= measure_health(url, "syncs", learner.sync)
            learner.backend.close()
        progress.update(task, advance=1)
    return results


if __name__ == "__main__":
    main(__doc__, measure, "--part", {})
