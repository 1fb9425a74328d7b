"""The HTTP client of one rollout server: health, weights and answers. Several threads may use it. Imports
no torch.

No call outlives its server. While a call is running, the client polls the server's health, and ends the call if
the server has died or has been silent for too long.
"""

import json
import math
import os
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal

import httpx

from coordexp.config.rollout import TOKEN, ServerEndpoint
from coordexp.errors import EngineError
from coordexp.servers.protocol import KEEP_ALIVE, read_error, read_response
from coordexp.tasks import Task

LARGEST = 2**30  # bytes of a response
LONGEST = 2**16  # bytes of a line of a response that stays open
ALTERNATIVES = (
    "set rollout_matching.vllm.mode: colocate, or rollout_matching.rollout_backend: hf (in Stage 1: "
    "stage1.eval_backend: hf)"
)
OTHERWISE = f"or {ALTERNATIVES}"
Health = Literal["ok", "refused", "silent", "failed"]


class ServerLost(EngineError):
    """The server is gone or has no weights. It may be asked again only after a sync of the current version."""


class ErrorResponse(EngineError):
    """The server answered with an error."""

    def __init__(self, problem: str, fix: str, status: int, code: str = "") -> None:
        super().__init__(problem, fix)
        self.status, self.code = status, code


class ServerFault(ErrorResponse, ServerLost):
    """The server answered with an error of its own (5xx)."""


class RequestRefused(ErrorResponse):
    """The server answered that the request or the setup is wrong (4xx)."""


@dataclass(frozen=True)
class ClientTimeouts:
    """How long the client waits, in seconds."""

    poll: float = 1.0  # between two health checks of a server
    health: float = 2.0  # for the response to a health check
    silence: float = 10.0  # without any response, until a server counts as lost
    call: float = 30.0  # for the response to a call that takes no time on the server


@dataclass(frozen=True)
class ServerFacts:
    """The facts that all ranks know about a server."""

    world_size: int
    max_model_len: int
    boot: str


class ServerClient:
    """Calls one server. `facts` are set when the server has been examined. `infer_timeout_s` limits generation
    calls; without it, or if it is not positive, they have no limit."""

    facts: ServerFacts | None = None
    _health: Health = "ok"

    def __init__(
        self,
        index: int,
        server: ServerEndpoint,
        infer_timeout_s: float | None = None,
        timeouts: ClientTimeouts | None = None,
    ) -> None:
        self.index, self.url, self.group_port = index, server.base_url, server.group_port
        self.timeouts = timeouts or ClientTimeouts()
        self._asking = Lock()
        self._asked = self._responded = -math.inf
        self._infer_timeout = infer_timeout_s if infer_timeout_s and infer_timeout_s > 0 else math.inf
        token = os.environ.get(TOKEN)
        self.http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=False,  # no proxy stands between a learner and its servers
            follow_redirects=False,
            timeout=httpx.Timeout(None, connect=self.timeouts.call),  # a `Call` ends by itself
            transport=httpx.HTTPTransport(
                verify=ssl.create_default_context(),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                socket_options=[*KEEP_ALIVE, (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
            ),
        )

    @property
    def name(self) -> str:
        return f"rollout server {self.index} ({self.url})"

    @property
    def world_size(self) -> int:
        assert self.facts is not None, "before the first sync"
        return self.facts.world_size

    def health(self) -> Health:
        try:
            with self.http.stream("GET", f"{self.url}/health/", timeout=self.timeouts.health) as response:
                return "ok" if response.status_code == 200 else "failed"
        except httpx.TimeoutException:
            return "silent"
        except httpx.TransportError:
            return "refused"

    def read(self, form: Any, path: str) -> Any:
        """Return the response of a route in a form of the protocol."""
        return read_response(form, self.get(path), self.name, path)

    def get(self, path: str) -> bytes:
        return Call(self, "GET", path).result(time.monotonic() + self.timeouts.call)

    def post(self, path: str, message: dict[str, Any], until: float) -> bytes:
        """Return the response. Raise ServerLost if the server dies meanwhile, or has not responded at `until`."""
        return Call(self, "POST", path, message).result(until)

    def infer(self, payload: dict[str, Any]) -> bytes:
        """Return the response. `infer_timeout_s` limits this call alone."""
        return self.post("/infer/", payload, time.monotonic() + self._infer_timeout)

    def check_alive(self, path: str, since: float) -> None:
        """Raise ServerLost, for a call to `path` that began at `since`, if the server has ended or has been silent
        for too long. However many calls are open, only one of them asks for the health at a time."""
        if self._asking.acquire(blocking=False):
            try:
                if (now := time.monotonic()) - self._asked >= 0.9 * self.timeouts.poll:
                    self._health, self._asked = self.health(), now
                    self._responded = time.monotonic() if self._health == "ok" else self._responded
            finally:
                self._asking.release()
        silent = time.monotonic() - max(self._responded, since)
        problems = {"refused": "it has ended", "failed": "its engine has ended or hangs"}
        if silent >= self.timeouts.silence:
            problems["silent"] = f"no response for {silent:.0f} s"
        if self._asked >= since and self._health in problems:
            raise ServerLost(f"{self.name}: {problems[self._health]} (in {path})")

    def to_error(self, status: int, path: str, body: bytes) -> ErrorResponse:
        """Return the error that a response stands for."""
        content: Any = {}
        with suppress(ValueError, RecursionError):
            content = json.loads(body)
        reason, fix, code = read_error(content)
        problem = f"{self.name}: {path} answered {status}" + (f" {code}" if code else "")
        problem += f": {reason}" if reason else ""
        if status >= 500:
            return ServerFault(problem, fix, status, code)
        if status == 401:
            fix = fix or f"set {TOKEN} to the same value for the server and the learner"
        elif status == 404:
            fix = fix or "base_url must lead to a server that `coordexp serve` has started"
        elif 300 <= status < 400:
            fix = "base_url must lead to the server itself, without a redirect"
        return RequestRefused(problem, fix, status, code)


class Call:
    """A request and its response, in a thread of its own, which begins at once. The response to a call that
    `stays_open` is read line by line until the call is cut off or the server ends it. `lines` counts them."""

    def __init__(
        self,
        client: ServerClient,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        stays_open: bool = False,
    ) -> None:
        self.client, self.path, self.since = client, path, time.monotonic()
        self.lines = 0
        self._stream: Any = None
        self._is_cut = False
        self._task = Task(self._run, method, body, stays_open)

    @property
    def has_ended(self) -> bool:
        return self._task.done.is_set()

    def check(self) -> None:
        """Raise the error of the call if it has failed, or if its server is lost."""
        if self.has_ended:
            self.result()
        else:
            self.client.check_alive(self.path, self.since)

    def result(self, until: float = math.inf) -> bytes:
        """Return the response. Raise ServerLost if it has not come at `until`, or if the server is lost."""
        name = self.client.name
        try:
            return self._task.result(deadline=until, check=self.check, interval=self.client.timeouts.poll)
        except TimeoutError:
            raise ServerLost(f"{name}: no answer in {until - self.since:.1f} s (in {self.path})") from None
        except httpx.TransportError as error:
            raise ServerLost(
                f"{name}: the connection failed in {self.path} ({str(error) or type(error).__name__})"
            ) from error
        finally:
            self.cut()

    def cut(self) -> None:
        """End the call by closing its socket, also one that is connected later."""
        self._is_cut = True
        if self._stream is not None and (connection := self._stream.get_extra_info("socket")) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self, method: str, body: dict[str, Any] | None, stays_open: bool) -> bytes:
        client, parts = self.client, bytearray()
        content = None if body is None else json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        headers = {} if content is None else {"Content-Type": "application/json"}
        options: Any = {"content": content, "headers": headers, "extensions": {"trace": self._trace}}
        with client.http.stream(method, f"{client.url}{self.path}", **options) as response:
            has_lines = stays_open and response.status_code == 200
            limit = LONGEST if has_lines else LARGEST
            for part in response.iter_bytes():
                parts += part
                if has_lines:
                    *lines, parts = parts.split(b"\n")
                    for line in filter(None, lines):
                        if b'"error"' in line:
                            raise client.to_error(500, self.path, bytes(line))
                        self.lines += 1
                if len(parts) > limit:
                    raise EngineError(f"{client.name}: its answer to {self.path} has more than {limit >> 10} KiB")
        if response.status_code != 200:
            raise client.to_error(response.status_code, self.path, bytes(parts))
        return bytes(parts)

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._stream = info["return_value"]
            if self._is_cut:
                self.cut()
