"""A fake rollout server: real HTTP, a real group for weights, no model. It fails the way a test wants.

It serves tests of faults and of the logic around a server. What depends on a model is tested with real engines.
"""

import json
import random
import select
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import uuid4

import torch

from coordexp.servers.transfer import WeightGroup, check_metadata, join, unflatten

CPU = torch.device("cpu")
Action = Callable[["Handler"], bool]  # returns True if it has answered the request


_given_ports: set[int] = set()


def free_port() -> int:
    """Return a free port below those that the system assigns to connections, so that none of these takes it while
    a server is down. No port is returned twice, since a server opens its group port only when a learner comes."""
    while True:
        port = random.randrange(12_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given_ports:
                _given_ports.add(port)
                return port


def _wait_until_free(port: int) -> None:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        with suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return
        time.sleep(0.01)


def answer_ids(seed: int) -> list[int]:
    """Return the tokens that the fake model writes for a seed."""
    return [3 + seed % 90, 5, 3 + seed // 90 % 90]


class Receiving:
    """A bucket that all workers of a server receive, each in a thread."""

    def __init__(self, groups: list[WeightGroup], length: int) -> None:
        self.length = length
        self._buffers = [torch.empty(length, dtype=torch.uint8) for _ in groups]
        self._threads = [
            threading.Thread(target=self._receive, args=(group, buffer), daemon=True)
            for group, buffer in zip(groups, self._buffers, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> torch.Tensor:
        for thread in self._threads:
            thread.join()
        return self._buffers[0]

    def _receive(self, group: WeightGroup, buffer: torch.Tensor) -> None:
        with suppress(RuntimeError, AttributeError):  # the learner has left
            group.broadcast(buffer)


class FakeRolloutServer:
    """A rollout server without a model. `facts` are returned by `/version/`.

    With a `prefix`, all routes are below it and nothing else is
    served. Each request to a path takes the next of `faults[path]`, which answers it or runs before the answer."""

    def __init__(
        self,
        facts: dict[str, Any],
        *,
        end_of_turn: int,
        prompt_ids: tuple[int, ...],
        world_size: int = 1,
        max_model_len: int = 1000,
        prefix: str = "",
    ) -> None:
        self.facts, self.end_of_turn, self.prompt_ids = facts, end_of_turn, prompt_ids
        self.world_size = world_size
        self.max_model_len, self.prefix = max_model_len, prefix
        self.port, self.group_port = free_port(), free_port()
        self.faults: dict[str, deque[Action]] = defaultdict(deque)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.leaving, self.dying, self.counting = threading.Lock(), threading.Lock(), threading.Lock()
        self.open_requests = self.most_open = 0  # requests in calls of `/infer/` that are not answered yet
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.prefix}"

    def start(self) -> None:
        """Start it with the weights of its checkpoint."""
        self.boot, self.version, self.sent_version = uuid4().hex, "default", ""
        self.weights: dict[str, torch.Tensor] = {}
        self.adapter: dict[str, Any] | None = None  # its config, as peft writes it
        self.lora, self.base_changed = True, False
        self.ahead: Receiving | None = None
        self.owner: str | None = None  # the name of the learner's group
        self.groups: list[WeightGroup] = []
        self.thawed = threading.Event()
        self.thawed.set()
        self.sockets: list[socket.socket] = []
        handler = type("Bound", (Handler,), {"fake": self})
        self.http = _Listener(("127.0.0.1", self.port), handler)
        self.http.fake = self
        self.up = True
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def die(self) -> None:
        """Break all connections, like a process that is killed."""
        with self.dying:
            if not self.up:
                return
            self.up = False
            self.http.shutdown()
            self.http.server_close()
            for connection in self.sockets:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self.leave(self.owner)

    def leave(self, group: str | None) -> None:
        """Leave the group. Its port is free for the next one."""
        with self.leaving:
            if group == self.owner:
                self.groups.clear()
                _wait_until_free(self.group_port)
                self.owner = None

    def restart(self) -> None:
        self.die()
        self.faults.clear()
        _wait_until_free(self.group_port)  # the previous group is left in a thread
        self.start()

    def freeze(self) -> None:
        """Listen but answer nothing, like a process that is stopped."""
        self.thawed.clear()

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def asked(self) -> list[list[int]]:
        """Return the seeds of the requests in each call to `/infer/`."""
        calls = [body["infer_requests"] for path, body in self.calls if path == "/infer/"]
        return [[request["data_dict"]["coordexp"]["seed"] for request in call] for call in calls]

    @contextmanager
    def counting_open(self, requests: int) -> Iterator[None]:
        with self.counting:
            self.open_requests += requests
            self.most_open = max(self.most_open, self.open_requests)
        try:
            yield
        finally:
            with self.counting:
                self.open_requests -= requests

    def receive(self, metadatas: list[dict[str, Any]], next_bytes: int) -> None:
        """Receive a bucket of the length that was announced, and begin to receive the next one."""
        length = check_metadata(metadatas)
        ahead, self.ahead = self.ahead or Receiving(self.groups, length), None
        assert ahead.length == length, (ahead.length, length)
        buffer = ahead.wait()
        self.ahead = Receiving(self.groups, next_bytes) if next_bytes else None
        self.weights |= {name: weight.clone() for name, weight in unflatten(metadatas, buffer)}

    def join(self, body: dict[str, Any]) -> None:
        self.groups = [None] * self.world_size  # type: ignore[list-item]
        timeout = body.get("timeout_s", 20)

        def join_as(rank: int) -> None:
            size = body["world_size"]
            self.groups[rank] = join("127.0.0.1", body["port"], rank, size, CPU, timeout)

        others = [
            threading.Thread(target=join_as, args=(rank,), daemon=True) for rank in range(1, self.world_size)
        ]
        for thread in others:
            thread.start()
        join_as(0)
        for thread in others:
            thread.join()

    def item(self, request: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        ids = [*answer_ids(request["data_dict"]["coordexp"]["seed"]), self.end_of_turn][: config["max_tokens"]]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": ""},
            "finish_reason": "stop" if ids[-1] == self.end_of_turn else "length",
            "token_ids": ids,
            "logprobs": {"content": [{"token": "", "logprob": -0.5} for _ in ids]},
        }
        response = {"id": "1", "object": "chat.completion", "created": 0, "model": "fake", "usage": {}}
        item = {"response": response | {"prompt_token_ids": list(self.prompt_ids), "choices": [choice]}}
        return item | {"rollout_infos": {"weight_version": self.version}}


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    fake: FakeRolloutServer

    def process_request(self, request: Any, client_address: Any) -> None:
        self.fake.sockets.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    fake: FakeRolloutServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._handle({})

    def do_POST(self) -> None:
        self._handle(json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}"))

    def reply(self, status: int, content: Any) -> None:
        self.reply_bytes(status, json.dumps(content).encode())

    def reply_bytes(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, code: str, message: str = "a fault of the test", fix: str = "none") -> None:
        self.reply(status, {"error": {"code": code, "message": message, "fix": fix}})

    def _handle(self, body: dict[str, Any]) -> None:
        fake = self.fake
        fake.thawed.wait()
        if not self.path.startswith(fake.prefix + "/"):
            self.reply(404, {"detail": "Not Found"})
            return
        self.path, _, self.query = self.path.removeprefix(fake.prefix).partition("?")
        fake.calls.append((self.path, body))
        with fake.counting_open(len(body.get("infer_requests", ()))):
            faults = fake.faults[self.path]
            if not (faults and faults.popleft()(self)):
                getattr(self, f"on_{self.path.strip('/')}")(body)

    def on_health(self, body: dict[str, Any]) -> None:
        self.reply(200, {"status": "ok"})

    def on_get_world_size(self, body: dict[str, Any]) -> None:
        self.reply(200, {"world_size": self.fake.world_size})

    def on_version(self, body: dict[str, Any]) -> None:
        fake = self.fake
        fixed = {"server": "coordexp", "release": "0.1.0", "protocol": 4, "devices": [], "lora": fake.lora}
        now = {"world_size": fake.world_size, "max_model_len": fake.max_model_len, "boot": fake.boot}
        weights = {"weight_version": fake.version, "updating": False, "learner": fake.owner}
        facts = fixed | now | weights | fake.facts
        if self.query != "full=1":
            facts.pop("model", None)
        self.reply(200, facts)

    def on_init_communicator(self, body: dict[str, Any]) -> None:
        fake = self.fake
        until = time.monotonic() + 0.2  # the previous learner may have just left
        while fake.owner is not None and time.monotonic() < until:
            time.sleep(0.01)
        if fake.owner is not None:
            self.refuse(409, "taken", "learner host:1 holds it", "end that one")
            return
        fake.owner = body["group"]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"message": "taken"}\n')
        fake.join(body)
        self.wfile.write(b'{"message": "joined"}\n')
        with suppress(OSError, ValueError):
            while not select.select([self.connection], [], [], 0.05)[0]:
                self.wfile.write(b"\n")
        fake.leave(body["group"])

    def on_begin_update(self, body: dict[str, Any]) -> None:
        if body["group"] != self.fake.owner:
            self.refuse(409, "other_group")
            return
        if body.get("adapter") and (self.fake.base_changed or not self.fake.lora):
            self.refuse(409, "base_changed" if self.fake.lora else "no_lora")
            return
        if not body.get("adapter"):
            self.fake.base_changed = True
        self.fake.weights, self.fake.ahead, self.fake.adapter = {}, None, body.get("adapter")
        self.fake.sent_version = body["version"]
        self.reply(200, {"message": "begun"})

    def on_load_bucket(self, body: dict[str, Any]) -> None:
        self.fake.receive(body["metadatas"], body.get("next_bytes", 0))
        self.reply(200, {"message": "taken"})

    def on_finish_update(self, body: dict[str, Any]) -> None:
        self.fake.version = self.fake.sent_version
        self.reply(200, {"weight_version": self.fake.version})

    def on_infer(self, body: dict[str, Any]) -> None:
        self.reply(200, [self.fake.item(request, body["request_config"]) for request in body["infer_requests"]])


# Faults


def status(code: int, kind: str = "fault") -> Action:
    def act(handler: Handler) -> bool:
        handler.refuse(code, kind)
        return True

    return act


def garbage(body: bytes = b"<html>Bad Gateway") -> Action:
    def act(handler: Handler) -> bool:
        handler.reply_bytes(200, body)
        return True

    return act


def slow(seconds: float) -> Action:
    def act(handler: Handler) -> bool:
        time.sleep(seconds)
        return False

    return act


def dies(handler: Handler) -> bool:
    handler.fake.die()
    return True


def freezes(handler: Handler) -> bool:
    handler.fake.freeze()
    handler.fake.thawed.wait(20)
    return True


def changed(change: Callable[[list[Any]], Any]) -> Action:
    """Answer `/infer/` with changed items."""

    def act(handler: Handler) -> bool:
        body = handler.fake.calls[-1][1]
        items = [handler.fake.item(request, body["request_config"]) for request in body["infer_requests"]]
        handler.reply(200, change(items))
        return True

    return act
