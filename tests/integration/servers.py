"""Real rollout servers, each in its own process with its engine, and a client that speaks plain HTTP."""

import base64
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from coordexp.doctor import free_ports
from coordexp.servers.transfer import flatten, join
from coordexp.train.learner import learner_weights
from tests.integration.stage2_runs import MODEL, Started, config, draw, started

SERVE = ["-c", "import sys; from coordexp.cli import main; main(sys.argv[1:])", "serve"]
GUARD = {
    "enabled": True,
    "min_new_tokens": 8,
    "max_consecutive_token_repeats": 6,
    "ngram_size": 6,
    "ngram_repeats": 3,
    "max_object_keys": 40,
}
GREEDY = {
    "max_tokens": 40,
    "temperature": 0.0,
    "top_k": -1,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "stop": [],
    "seed": 5,
    "n": 1,
    "return_details": True,
    "logprobs": True,
}
START = 300.0  # seconds


class Fleet:
    """Servers of the committed model, on free ports, with a guard that its answers do not trigger."""

    def __init__(self, folder: Path, count: int, **vllm: Any) -> None:
        self.folder, self.vllm = draw(folder), vllm
        ports = free_ports(2 * count)
        self.ports = ports[:count]
        self.servers = [
            {"base_url": f"http://127.0.0.1:{http}", "group_port": group}
            for http, group in zip(ports[:count], ports[count:], strict=True)
        ]
        self.file = self.config("fleet")
        self.variables: dict[str, str] = {}  # added to the servers' environment
        self._running: dict[int, tuple[ExitStack, Started]] = {}

    def config(self, name: str, count: int | None = None, **changes: Any) -> Path:
        """Write the config of a run that uses the first `count` servers."""
        vllm = {
            "mode": "server",
            "gpu_memory_utilization": 0.1,
            "enforce_eager": True,
            "server": {"servers": self.servers[:count], "timeout_s": 60.0},
            "sync": {"timeout_s": 30.0},
        } | self.vllm
        ours = {
            "rollout_matching__rollout_backend": "vllm",
            "rollout_matching__vllm": vllm,
            "rollout_matching__repeat_terminate": GUARD,
        }
        return config(self.folder, name, **(ours | changes))

    def launch(self, index: int) -> None:
        """Start a server, and do not wait for it."""
        stack = ExitStack()
        words = [*SERVE, "--config", str(self.file), "--index", str(index)]
        self._running[index] = (stack, stack.enter_context(started(words, **self.variables)))

    def start(self, *indices: int) -> None:
        """Start servers side by side, and wait until they are ready."""
        for index in indices:
            self.launch(index)
        for index in indices:
            wait_for(lambda index=index: self.is_ready(index), START, lambda index=index: self[index].shown)

    def is_ready(self, index: int) -> bool:
        if self[index].process.poll() is not None:
            raise AssertionError(f"server {index} has ended:\n{self[index].shown[-3000:]}")
        try:
            # Not to read certificates saves a tenth of a second.
            answer = httpx.get(f"{self.url(index)}/health/", timeout=5, trust_env=False, verify=False)
            return answer.status_code == 200
        except httpx.HTTPError:
            return False

    def ensure(self, count: int) -> None:
        """Start those of the first servers that do not run, whatever a test has done to them."""
        dead = [
            index
            for index in range(count)
            if index not in self._running or self[index].process.poll() is not None or not self.is_ready(index)
        ]
        for index in dead:
            self.stop(index)
        self.start(*dead)

    def __getitem__(self, index: int) -> Started:
        return self._running[index][1]

    def url(self, index: int) -> str:
        return str(self.servers[index]["base_url"])

    def stop(self, index: int) -> None:
        """Kill the server and all of its processes."""
        if index in self._running:
            self._running.pop(index)[0].close()

    def signal(self, index: int, number: signal.Signals) -> None:
        """Send a signal to all processes of the server."""
        for pid in self[index].left():
            os.kill(pid, number)

    def close(self) -> None:
        for index in list(self._running):
            self.stop(index)

    def images(self) -> list[str]:
        return sorted(map(str, (self.folder / "data/images/train").glob("*.png")))


def wait_for(done: Callable[[], bool], seconds: float, shown: Callable[[], str] = lambda: "") -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"waited for {seconds} s\n{shown()[-3000:]}"
        time.sleep(0.2)


def infer_request(image: str, **own: Any) -> dict[str, Any]:
    """Return a request as ms-swift writes it. `own` are the fields that only our learner adds."""
    request = {"messages": [{"role": "user", "content": "<image>Detect all objects."}], "images": [image]}
    return request | ({"data_dict": {"coordexp": own}} if own else {})


def base64_of(image: str) -> str:
    return base64.b64encode(Path(image).read_bytes()).decode()


def assert_ok(answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text


class PlainClient:
    """A learner that speaks plain HTTP, and asks as clients of ms-swift do."""

    def __init__(self, url: str, port: int, token: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False, headers=headers)
        self.url, self.port = url, port
        self.group: Any = None
        self.held: httpx.Response | None = None

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def infer(self, requests: Sequence[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
        answer = self.post("/infer/", infer_requests=list(requests), request_config=GREEDY | changes)
        assert answer.status_code == 200, answer.text
        return list(answer.json())

    def join(self, group: str, **more: Any) -> httpx.Response:
        """Join a group. The response stays open, and `leave` closes it."""
        self.leave()
        size = int(self.http.get("/get_world_size/").json()["world_size"]) + 1
        body = {"group": group, "port": self.port, "world_size": size, "learner": "test:1", **more}
        request = self.http.build_request("POST", "/init_communicator/", json=body)
        with concurrently(lambda: self.http.send(request, stream=True)) as answer:
            self.group = join("127.0.0.1", self.port, size - 1, size, torch.device("cpu"), 20.0)
        lines = answer[0].iter_lines()
        assert (next(lines), next(lines)) == ('{"message": "taken"}', '{"message": "joined"}')
        self.held, self._lines = answer[0], lines  # the connection closes with them
        return answer[0]

    def leave(self) -> None:
        if self.held is not None:
            self.held.close()
            with suppress(httpx.TransportError):  # the server has ended
                wait_for(lambda: self.http.get("/version/").json()["learner"] is None, 20)
        self.held = None

    def send(self, weights: Iterable[tuple[str, Tensor]], **more: Any) -> httpx.Response:
        metadatas, buffer = flatten(weights, torch.empty(0, dtype=torch.uint8))
        body = {"metadatas": metadatas, **more}
        with concurrently(lambda: self.post("/load_bucket/", **body)) as answer:
            self.group.broadcast(buffer)
        return answer[0]

    def update(self, weights: Iterable[tuple[str, Tensor]], version: str, group: str, **more: Any) -> None:
        assert_ok(self.post("/begin_update/", group=group, version=version, **more))
        assert_ok(self.send(weights, group=group))
        assert_ok(self.post("/finish_update/", group=group))

    @contextmanager
    def learner(self, name: str) -> Iterator[str]:
        """Yield the name of a group, and leave the group at the end of the block."""
        try:
            yield name
        finally:
            self.leave()

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        self.http.close()


@contextmanager
def concurrently(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """Do some work in a thread while the block runs. Yield a list that holds its result after the block."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    yield results
    thread.join(60)
    assert results, "the work did not end"


def model_weights(noise: float = 0.0, seed: int = 0) -> list[tuple[str, Tensor]]:
    """Return the weights of the committed model. With noise, the model babbles."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32)
    draws = torch.Generator().manual_seed(seed)
    return [
        (name, weight + noise * weight.std() * torch.randn(weight.shape, generator=draws) if noise else weight)
        for name, weight in learner_weights(model)
    ]
